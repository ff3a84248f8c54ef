"""A node whose ranks are on two machines, one of which is lost and comes again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.child import Child
from tests.cluster.conftest import eventually, nodes, small_config
from tests.cluster.test_ranks import GREEDY, is_back, serves_exactly, whole
from tests.processes import children_of

TIMEOUT_S = 2.0


def a_free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def daemon(directory: Path, name: str, module: str, *options: str) -> Child:
    command = [sys.executable, "-m", module]
    for option in (f"node.id={name}", *options):
        command += ["--set", option] if "=" in option else [option]
    return Child(name, command, directory / f"{name}.log", sends_json=True)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("whom", ["far", "near"])
async def test_a_machine_lost_while_decoding_costs_no_token(
    tmp_path: Path, whom: str, number: signal.Signals
) -> None:
    """far: that of a rank host; near: that of the node itself."""
    config = small_config()
    config = replace(
        config,
        security=replace(config.security, cluster_key="of the whole cluster"),
        cluster=replace(config.cluster, prefill=1, decode=1),
    )
    async with LocalCluster(config, directory=tmp_path) as cluster, Client(cluster.url) as client:
        secret, port = "security.cluster_key=of the whole cluster", a_free_port()
        far = daemon(
            tmp_path, "far", "moonpool.engine.ranks.hosts.daemon", "--leader", f"127.0.0.1:{port}", secret
        )
        near = daemon(
            tmp_path,
            "near",
            "moonpool.node",
            "--role",
            "decode",
            "--config",
            str(tmp_path / "cluster.toml"),
            "node.port=0",
            "engine.parallel.pp=2",
            "engine.parallel.hosts=2",
            f"engine.parallel.listen=127.0.0.1:{port}",
            f"engine.parallel.timeout_s={TIMEOUT_S}",
        )
        try:
            await asyncio.gather(far.start(), near.start())
            await asyncio.gather(far.wait_ready(60), near.wait_ready(60))
            assert near.ready["ranks"] == "tp 1 × pp 2 on 127.0.0.1, far (127.0.0.1)"
            (rank,) = children_of(far.pid)
            await loses_it(client, far if whom == "far" else near, number, rank)
            assert secret.partition("=")[2] not in (tmp_path / "far.log").read_text()
        finally:
            for child in (far, near):
                child.kill()
                await child.wait()


async def loses_it(client: Client, lost: Child, number: signal.Signals, rank: psutil.Process) -> None:
    async def joined() -> bool:
        return "near" in await nodes(client)

    await eventually(joined)
    assert (await nodes(client))["near"]["ranks"] == "tp 1 × pp 2 on 127.0.0.1, far (127.0.0.1)"
    prompt = "And the LORD said unto him " * 8
    expected = await whole(client, prompt)
    before = dict[str, Any]()
    cut_off: list[str] = []

    async def stream() -> None:
        reply = Reply()
        async for _ in client.complete(prompt, reply, **GREEDY):
            if not before and len(reply.pieces_s) >= 20:
                told = (await client.timeline(reply.id))["summary"]
                if told["decode_node"] == "near" and not before:
                    before.update((await nodes(client))["near"])
                    cut_off.append(reply.id)
                    os.kill(lost.pid, number)
        assert reply.text == expected

    # Of four some are with each of the two decode nodes.
    async with asyncio.timeout(60):
        while not before:
            await asyncio.gather(*(stream() for _ in range(4)))
    assert "retry" in [event["event"] for event in (await client.timeline(cut_off[0]))["events"]]

    async def its_rank_is_gone() -> bool:
        return not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE

    await eventually(its_rank_is_gone)
    if number == signal.SIGSTOP:
        os.kill(lost.pid, signal.SIGCONT)
    else:
        await lost.wait()
        await lost.start()

    async def serves_again() -> bool:
        if number == signal.SIGKILL and lost.name == "near":
            node = (await nodes(client)).get("near", {"state": "gone"})
            return node["state"] == "ready" and node["pid"] != before["pid"]
        return await is_back(client, before)

    await eventually(serves_again)
    await serves_exactly(client)
