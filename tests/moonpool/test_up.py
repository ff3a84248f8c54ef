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

from tests.processes import are_gone

ROOT = Path(__file__).parents[2]
UP = [sys.executable, "-m", "moonpool", "up", "--port", "0", "--prefill", "1", "--decode", "1"]


@pytest.fixture
def cluster() -> Iterator[subprocess.Popen[str]]:
    """A cluster that serves: its conversation is over and its URLs are printed."""
    with subprocess.Popen(
        UP, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        yield process
        if process.poll() is None:
            process.kill()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    pytest.fail(f"it ended before it said {words!r}:\n{seen}")


def members(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 5  # redis, conductor, prefill-0, decode-0, and the fork server
    return children


def test_once_holds_a_conversation_and_exits() -> None:
    with tempfile.TemporaryDirectory(prefix="up") as temporary:
        environment = {**os.environ, "TMPDIR": temporary}
        done = subprocess.run(
            [*UP, "--once"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(Path(temporary).glob("moonpool-*")) == [], "the logs of a run without failures"
    assert done.stdout.count("you ") == 3
    # The decode node may compute the short rest of a later turn itself.
    rows = re.findall(r"^(\d) +(?:prefill|decode)-0 +decode-0 +(\d+) +(\d+) ", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    cached = [int(row[2]) for row in rows]
    assert cached[0] == 0
    assert all(cached[1:]), f"a turn found nothing of those before it: {cached}"


def test_kill_9_leaves_nothing_running(cluster: subprocess.Popen[str]) -> None:
    read_until(cluster, "Serving.")
    processes = members(cluster)
    cluster.kill()
    assert are_gone(processes)


def test_a_killed_node_is_started_again_and_ctrl_c_stops_everything(cluster: subprocess.Popen[str]) -> None:
    seen = read_until(cluster, "Serving.")
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

    before = decode_pid()
    assert before is not None
    psutil.Process(before).kill()
    read_until(cluster, "starting it again")
    read_until(cluster, "decode-0 is ready")
    deadline = time.monotonic() + 60
    while decode_pid() in (None, before):
        assert time.monotonic() < deadline, "the new decode-0 is not in the cluster"
        time.sleep(0.05)
    processes = members(cluster)
    cluster.send_signal(signal.SIGINT)
    assert cluster.wait(60) == 0
    assert are_gone(processes)
    directory = re.search(r"logs +(\S+)", seen)
    assert directory is not None
    assert Path(directory[1]).exists(), "a node failed"
    shutil.rmtree(directory[1])


@pytest.mark.slow
def test_a_node_killed_in_the_first_conversation_is_started_again() -> None:
    command = [*UP[: UP.index("--decode")], "--decode", "2"]
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
            assert process.wait(60) == 0
        finally:
            process.kill()
