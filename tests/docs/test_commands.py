"""Every command in docs/ runs as it stands there, against a real cluster; every link leads somewhere."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from moonpool.client import Client, Reply
from moonpool.local_cluster import LocalCluster
from moonpool.top import Rates, top_view

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def blocks(kind: str) -> list[tuple[str, str]]:
    """(page, commands) of every fenced block whose first line says ``kind``."""
    return [
        (page.name, found)
        for page in PAGES
        for found in re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]


def environment(cluster: LocalCluster) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "MOONPOOL_URL": cluster.url,
        "REDIS_URL": cluster.config.index.redis_url,
    }


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("page", "commands"), blocks("sh"))
async def test_commands_run(page: str, commands: str, cluster: LocalCluster, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", commands),
        cwd=tmp_path,
        env=environment(cluster),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert "Traceback" not in output.decode()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("page", "commands"), blocks("sh daemon"))
async def test_daemons_start_and_drain(
    page: str, commands: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f"exec {commands}"),
        cwd=tmp_path,
        env=environment(cluster),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert json.loads(line)["ready"]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.asyncio(loop_scope="module")
async def test_top_shows_what_the_conductor_tells(cluster: LocalCluster) -> None:
    console, rates = Console(width=200, record=True, file=io.StringIO()), Rates()
    async with Client(cluster.url) as client:
        async for _ in client.complete("In the beginning", Reply(), max_tokens=8):
            pass
        async for now in client.live():
            console.print(top_view(client.url, now, rates))
            if rates.before is not None:
                break
            rates.before = now
    shown = console.export_text()
    event = now["events"][-1]
    names = [node.name for node in cluster.nodes]
    for text in (*names, now["requests"][0]["id"], f"{event['kind']} {event['node']}", "MB/s"):
        assert text in shown


async def test_top_waits_for_a_conductor_that_is_not_there() -> None:
    """In a terminal of its own, until it is interrupted."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "moonpool", "top", "--url", "http://127.0.0.1:9"]
    process = await asyncio.create_subprocess_exec(*command, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    try:
        shown = b""
        while b"no answer" not in shown:
            shown += await asyncio.to_thread(os.read, leader, 4096)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(leader)


@pytest.mark.parametrize(
    "page", [*PAGES, *DOCS.glob("*/*.md"), DOCS.parent / "README.md"], ids=lambda path: path.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
