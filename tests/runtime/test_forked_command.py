"""``tests/forked_command.py``: a command is what ``python -m`` would be, and ends with its client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.forked_command import forked_command, write_moonpool
from tests.processes import are_gone

ROOT = Path(__file__).parents[2]
TARGET = "tests.runtime.fork_target"


def run(*command: str, cwd: Path = ROOT, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=os.environ | environment
    )
    return done.returncode, done.stdout + done.stderr


def test_it_says_and_ends_as_the_executed_command_does(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text("[conductor]\nport = 7\n")
    for words in (["config", "--config", "some.toml"], ["config", "--set", "conductor.prot=1"], ["--help"]):
        executed = run(sys.executable, "-m", "moonpool", *words, cwd=tmp_path, PYTHONPATH=str(ROOT))
        assert run(*forked_command("moonpool"), *words, cwd=tmp_path) == executed
    write_moonpool(tmp_path)
    assert run("moonpool", "config", "--config", "some.toml", cwd=tmp_path, PATH=str(tmp_path)) == (
        0,
        "conductor.port = 7\n",
    )


def test_what_the_fork_server_does_not_serve_is_executed() -> None:
    assert run(*forked_command("json.tool"), "nowhere") == run(sys.executable, "-m", "json.tool", "nowhere")


def test_it_has_the_files_and_the_exit_code() -> None:
    assert run(*forked_command(TARGET), "complain", "7") == (7, "something is wrong\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_its_client(number: signal.Signals) -> None:
    with subprocess.Popen([*forked_command(TARGET), "facts", "sleep"], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        forked = psutil.Process(json.loads(client.stdout.readline())["pid"])
        assert forked.pid != client.pid
        client.send_signal(number)
        assert client.wait(60) == -number
    assert are_gone([forked])
