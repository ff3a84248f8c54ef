"""A whole cluster on a Redis with a user for each role: nothing that people get to see has a secret in it."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from moonpool.client import Client, Reply
from moonpool.kvstore.index.redis.acl import redis_users
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.tied_command import tied_command
from tests.cluster.conftest import another, eventually, nodes, small_config, started
from tests.kvstore.redis_servers import Server

WRONG = "wrong-" + secrets.token_hex(8)
PAGES = ("v1/cluster", "v1/about", "v1/report", "metrics", "readyz", "v1/requests", "")


def command_lines() -> str:
    """Of all processes that we may see, as ``ps`` shows them; not ours, whose arguments are pytest's."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes().decode(errors="replace"))
        except OSError:
            continue  # it has ended
    return "\n".join(found)


async def output_of(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moonpool", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    return (await process.communicate())[0].decode()


@asynccontextmanager
async def node_with_a_wrong_password(directory: Path, url: str) -> AsyncIterator[Path]:
    """A node whose options are on its command line; its log."""
    log = directory / "wrong.log"
    options = (f"index.redis_url={url}", "node.id=wrong", "node.port=0", "node.metrics_port=0")
    command = [sys.executable, "-m", "moonpool.kvstore.store_node"]
    for option in (*options, f"security.cluster_key={WRONG}-cluster-key"):
        command += ["--set", option]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*tied_command(command), stdout=out, stderr=out)
    try:
        yield log
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
async def test_a_cluster_shows_no_secret_of_its_own(tmp_path: Path) -> None:
    server = Server(tmp_path)
    users = {user.role: user for user in redis_users(server.url, "moonpool")}
    (tmp_path / "users.acl").write_text("\n".join(["user default off", *(u.line for u in users.values())]))
    (tmp_path / "node.url").write_text(users["node"].url)
    server = Server(tmp_path, "--aclfile", str(tmp_path / "users.acl"))
    server.url = users["operator"].url
    passwords = [user.url.partition("@")[0].rpartition(":")[2] for user in users.values()]
    key = secrets.token_hex(16)
    base = small_config()
    as_node = (f"index.redis_url=@{tmp_path / 'node.url'}",)
    config = replace(
        base,
        index=replace(base.index, redis_url=users["conductor"].url),
        security=replace(base.security, cluster_key=key),
        cluster=replace(base.cluster, prefill=1, decode=1, prefill_options=as_node, decode_options=as_node),
    )
    wrong_url = users["node"].url.replace(passwords[0], WRONG)
    shown: dict[str, str] = {}
    await server.start()
    try:
        async with LocalCluster(config, directory=tmp_path) as cluster, Client(cluster.url) as client:
            store = another(cluster, "store-9", "store", *as_node)
            async with started(store), node_with_a_wrong_password(tmp_path, wrong_url) as log:
                for _ in range(2):
                    reply = Reply()
                    async for _ in client.complete("A word in confidence " * 9, reply, max_tokens=4):
                        pass
                assert (await client.timeline(reply.id))["summary"]["cached_tokens"] > 0
                assert (await nodes(client)).keys() == {"prefill-0", "decode-0", "store-9"}

                async def refused() -> bool:
                    return "invalid username-password" in log.read_text() or "WRONGPASS" in log.read_text()

                await eventually(refused)
                async with aiohttp.ClientSession() as http:
                    for page in PAGES:
                        async with http.get(f"{cluster.url}/{page}") as answer:
                            shown[page] = await answer.text()
                url, wrong = ("--url", cluster.url), ("--redis", wrong_url)
                (tmp_path / "options.toml").write_text(
                    f'index.redis_url = "{users["operator"].url}"\nsecurity.cluster_key = "{key}"\n'
                )
                right = ("--config", str(tmp_path / "options.toml"))
                outputs = await asyncio.gather(
                    output_of("index", "verify", *right),
                    output_of("index", "verify", *wrong),
                    output_of("doctor", "--json", *url, *right),
                    output_of("doctor", *url, *wrong),
                    output_of("up", "--once", "--port", "0", *wrong),
                    output_of("config", *right),
                    output_of("report", *url, "--seconds", "0.1", "-o", str(tmp_path / "report.html")),
                )
                shown |= {f"output {number}": text for number, text in enumerate(outputs)}
                shown["ps"] = command_lines()
        for file in (*tmp_path.glob("*.log"), tmp_path / "report.html"):
            shown[file.name] = file.read_text(errors="replace")
    finally:
        await server.kill()
    assert "prefill-0" in outputs[0]
    assert "forged" not in outputs[0]
    assert "skipped" not in outputs[0]
    assert "does not answer" in outputs[4]
    assert shown.keys() >= {"conductor.log", "prefill-0.log", "store-9.log", "wrong.log", "report.html"}
    assert "node.id=wrong" in shown["ps"]
    for name, text in shown.items():
        for secret in (*passwords, key, WRONG):
            assert secret not in text, f"{secret} in {name}"
