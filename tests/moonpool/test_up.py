"""``moonpool up`` on the shipped model: the whole path, and no process left afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.forked import PipedProcess, start_module
from tests.processes import are_gone, descendants_of

ROOT = Path(__file__).parents[2]
UP = ["up", "--port", "0", "--prefill", "1", "--decode", "1"]
EXECUTED = [sys.executable, "-m", "moonpool", *UP]


@pytest.fixture
def executed() -> Iterator[subprocess.Popen[str]]:
    """A cluster as a shell starts it: with a fork server of its own."""
    with subprocess.Popen(
        EXECUTED, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        yield process
        if process.poll() is None:
            process.kill()


@pytest.fixture
def forked() -> Iterator[PipedProcess]:
    """A cluster whose processes the tests' fork server forks."""
    with start_module("moonpool", *UP, stderr_with_stdout=True) as process:
        yield process
        if process.poll() is None:
            process.kill()


def read_until(process: subprocess.Popen[str] | PipedProcess, words: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line if isinstance(line, str) else line.decode()
        if words in seen:
            return seen
    pytest.fail(f"it ended before it said {words!r}:\n{seen}")


def test_once_holds_a_conversation_and_exits() -> None:
    with tempfile.TemporaryDirectory(prefix="up") as temporary:
        environment = {**os.environ, "TMPDIR": temporary}
        with start_module(
            "moonpool", *UP, "--once", environment=environment, stderr_with_stdout=True
        ) as process:
            said = process.stdout.read().decode()
            assert process.wait(120) == 0, said
        assert list(Path(temporary).glob("moonpool-*")) == [], "the logs of a run without failures"
    assert len(re.findall(r"^you  ", said, re.MULTILINE)) == 3
    # The decode node may compute the short rest of a later turn itself.
    rows = re.findall(r"^(\d) +(?:prefill|decode)-0 +decode-0 +(\d+) +(\d+) ", said, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    cached = [int(row[2]) for row in rows]
    assert cached[0] == 0
    assert all(cached[1:]), f"a turn found nothing of those before it: {cached}"


@pytest.mark.slow
def test_kill_9_leaves_nothing_running(executed: subprocess.Popen[str]) -> None:
    read_until(executed, "Serving.")
    processes = psutil.Process(executed.pid).children(recursive=True)
    assert len(processes) == 6  # redis, conductor, prefill-0, decode-0, and two fork servers
    executed.kill()
    assert are_gone(processes)


def test_a_killed_node_is_started_again_and_ctrl_c_stops_everything(forked: PipedProcess) -> None:
    seen = read_until(forked, "Serving.")
    assert "/v1/chat/completions" in seen
    found = re.search(r"API +(http\S+)/v1", seen)
    assert found is not None

    def decode_pid() -> int | None:
        with urllib.request.urlopen(f"{found[1]}/v1/cluster", timeout=60) as answer:
            nodes = json.load(answer)["nodes"]
        return next(
            (node["pid"] for node in nodes if node["node_id"] == "decode-0" and node["state"] == "ready"),
            None,
        )

    deadline = time.monotonic() + 60
    while (before := decode_pid()) is None:
        assert time.monotonic() < deadline, "decode-0 is not in the cluster"
        time.sleep(0.05)
    psutil.Process(before).kill()
    read_until(forked, "starting it again")
    read_until(forked, "decode-0 is ready")
    deadline = time.monotonic() + 60
    while decode_pid() in (None, before):
        assert time.monotonic() < deadline, "the new decode-0 is not in the cluster"
        time.sleep(0.05)
    processes = descendants_of(forked.pid)
    assert len(processes) == 4
    forked.send_signal(signal.SIGINT)
    assert forked.wait(120) == 0
    assert are_gone(processes)
    directory = re.search(r"logs +(\S+)", seen)
    assert directory is not None
    assert Path(directory[1]).exists(), "a node failed"
    shutil.rmtree(directory[1])


@pytest.mark.slow
def test_a_node_killed_in_the_first_conversation_is_started_again() -> None:
    command = [*EXECUTED, "--decode", "2"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            read_until(process, "you ")
            victims = [
                child
                for child in psutil.Process(process.pid).children(recursive=True)
                if "node.id=decode-1" in " ".join(child.cmdline())
            ]
            assert len(victims) == 1
            victims[0].kill()
            seen = read_until(process, "Serving.")
            if "decode-1 is ready" not in seen:
                seen += read_until(process, "decode-1 is ready")
            assert "decode-1 ended with code -9: starting it again" in seen
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            process.kill()
