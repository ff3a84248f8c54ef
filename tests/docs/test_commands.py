"""Every command in docs/ runs as it stands there, against a real cluster; every link leads somewhere."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console

from moonpool.cli import cli
from moonpool.client import Client, Reply
from moonpool.commands.top import Rates, top_view
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Placement, Reason
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.loading import explain
from tests.conductor.views import REQUEST, node
from tests.conductor.views import cluster as cluster_view
from tests.forked_command import write_moonpool

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def blocks(kind: str) -> list[tuple[str, str]]:
    """(page, commands) of every fenced block whose first line says ``kind``; each once, on its last page."""
    found = {
        commands: page.name
        for page in PAGES
        for commands in re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    }
    return [(page, commands) for commands, page in found.items()]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which ``moonpool`` is."""
    directory = tmp_path_factory.mktemp("bin")
    write_moonpool(directory)
    return f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def environment(cluster: LocalCluster, programs: str) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": programs,
        "MOONPOOL_URL": cluster.url,
        "CHECKPOINT": str(cluster.config.model.directory),
        "REDIS_URL": cluster.config.index.redis_url,
    }


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("page", "commands"), blocks("sh"))
async def test_commands_run(
    page: str, commands: str, cluster: LocalCluster, programs: str, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", commands),
        cwd=tmp_path,
        env=environment(cluster, programs),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert "Traceback" not in output.decode()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("page", "commands"), blocks("sh daemon"))
async def test_daemons_start_and_drain(
    page: str, commands: str, cluster: LocalCluster, programs: str, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f"exec {commands}"),
        cwd=tmp_path,
        env=environment(cluster, programs),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert json.loads(line)["ready"]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(("page", "commands"), blocks("sh make"))
def test_what_make_is_asked_for_it_makes(page: str, commands: str) -> None:
    """In a clean checkout ``.ci/run`` runs them; here make says what it would do."""
    continuous = (DOCS.parent / ".ci" / "run").read_text()
    for line in commands.splitlines():
        assert line in continuous
        done = subprocess.run([*line.split(), "--dry-run"], cwd=DOCS.parent, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()


def shown_commands() -> list[tuple[str, str]]:
    """(page, command line) of every ``moonpool …`` that people are shown, in a fence or in a sentence."""
    found = []
    for page in (*PAGES, DOCS.parent / "README.md"):
        text = page.read_text().replace("\\\n", " ")
        spans = re.findall(r"`(moonpool [^`…]+)`", text)
        lines = re.findall(r"^(?: {4})?(?:\.venv/bin/)?(moonpool .*)$", text, re.MULTILINE)
        found += [(page.name, one) for one in dict.fromkeys([*spans, *lines])]
    return found


@pytest.mark.parametrize(("page", "line"), shown_commands())
def test_a_command_that_is_shown_is_one_there_is(page: str, line: str) -> None:
    words = shlex.split(re.sub(r"\s#.*|[|>&].*", "", line))[1:]
    command: click.Command = cli
    while isinstance(command, click.Group):
        if not words or words[0] == "--help" or words[0].isupper():
            return  # a group of commands, or a placeholder for any of them
        name = words.pop(0).split("|")[0]
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"{page}: there is no {name}"
        command = found
    if not command.context_settings.get("ignore_unknown_options"):  # else another parser reads them
        options = {"--help", *(name for one in command.params for name in one.opts)}
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= options, f"{page}: {line}"
    known = {row.key for row in explain()}
    used = re.findall(r"--set[ =]([a-z_.]+)=", line)
    assert set(used) <= known, f"{page}: {line}"


def test_files_that_pages_name_are_there() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|toml|yaml|yml|md))`", page.read_text()):
            assert (DOCS.parent / name).exists(), f"{page.name} names {name}"


def test_the_policy_that_is_written_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (text for page, text in blocks("python") if page == "extending.md")
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(code, "extending.md", "exec"), names)
    sticky = names["Sticky"]()
    nodes = [node("p0", queue_s=0.05), node("p1")]
    view = cluster_view(nodes, [node("d0")], {"p0": 10})
    outcome = place(REQUEST, view, Slo(), sticky)
    assert isinstance(outcome, Placement)
    assert (outcome.prefill.node_id, outcome.reason, outcome.policy) == ("p0", Reason.LOCALITY, "sticky")
    busy = cluster_view([node("p0", queue_s=5.0), node("p1")], [node("d0")], {"p0": 10})
    away = place(REQUEST, busy, Slo(), sticky)
    assert isinstance(away, Placement)
    assert (away.prefill.node_id, away.reason) == ("p1", Reason.LOAD)


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
    # Tests that run in the background are deaf to it, and so are their children, unless somebody listens.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = await asyncio.create_subprocess_exec(*command, stdin=follower, stdout=follower, stderr=follower)
    signal.signal(signal.SIGINT, usual)
    os.close(follower)
    try:
        shown = b""
        while b"no answer" not in shown:
            shown += await asyncio.to_thread(os.read, leader, 4096)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0
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
