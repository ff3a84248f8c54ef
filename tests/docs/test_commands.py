"""Every command in docs/ runs as it stands there, against a real cluster; every link leads somewhere."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from moonpool.local_cluster import LocalCluster

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


@pytest.mark.parametrize(
    "page", [*PAGES, *DOCS.glob("*/*.md"), DOCS.parent / "README.md"], ids=lambda path: path.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
