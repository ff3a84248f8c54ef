"""The service life cycle: ready line, signals, and end with the parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from moonpool.runtime.errors import PortInUse
from moonpool.runtime.observing.metrics_server import serve_metrics
from moonpool.runtime.service import vital
from moonpool.runtime.service.tied_command import tied_command

ROOT = Path(__file__).parents[2]

DAEMON = """
import asyncio, sys
from moonpool.runtime.service.lifecycle import run_service
async def main(config, context):
    context.ready(node_id=config.node.id)
    await context.draining.wait()
    print("drained", flush=True)
    if config.node.id == "stuck":
        await asyncio.Event().wait()
sys.exit(run_service(main, role="test-node"))
"""

FROZEN = """
import asyncio, gc, sys
from moonpool.runtime.service.lifecycle import run_service
class Garbage:
    def __del__(self):
        print("collected", flush=True)
async def main(config, context):
    gc.disable()
    one = Garbage()
    one.itself, one = one, None
    before = gc.get_freeze_count()
    context.ready()
    print(before, gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1_000, flush=True)
sys.exit(run_service(main, role="test-node"))
"""

BROKEN = """
import asyncio, sys
from contextlib import AsyncExitStack
from moonpool.runtime.service.lifecycle import run_service
from moonpool.runtime.service.vital import vital
async def sweep():
    await asyncio.sleep(0)
    raise KeyError("lease")
async def main(config, context):
    async with AsyncExitStack() as stack:
        stack.callback(print, "first closed", flush=True)
        stack.callback(print, "second closed", flush=True)
        stack.callback(vital(sweep(), "sweep").cancel)
        await context.draining.wait()
sys.exit(run_service(main, role="test-node"))
"""

PARENT = """
import subprocess, sys
from moonpool.runtime.service.tied_command import tied_command
child = subprocess.Popen(tied_command([sys.executable, "-c", "print('up', flush=True); input()"]),
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
input()
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_ready_then_drain() -> None:
    with start(DAEMON, "--set", "node.id=a") as daemon:
        ready = json.loads(line(daemon))
        assert ready == {"ready": True, "role": "test-node", "pid": daemon.pid, "node_id": "a"}
        daemon.send_signal(signal.SIGTERM)
        assert line(daemon) == "drained"
        assert daemon.wait(60) == 0


def test_what_a_start_made_is_not_searched_for_garbage_while_requests_run() -> None:
    with start(FROZEN) as daemon:
        assert line(daemon) == "collected"
        assert json.loads(line(daemon))["ready"]
        assert line(daemon) == "0 True True"


def test_second_signal_cancels_a_drain() -> None:
    with start(DAEMON, "--set", "node.id=stuck") as daemon:
        line(daemon)
        daemon.send_signal(signal.SIGTERM)
        assert line(daemon) == "drained"
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 1


def test_wrong_option_ends_with_a_sentence() -> None:
    with start(DAEMON, "--set", "node.prot=1") as daemon:
        _, stderr = daemon.communicate(timeout=60)
    assert daemon.returncode == 2
    assert stderr.strip() == (
        "moonpool test-node: --set node.prot=1: unknown option node.prot; the nearest is node.port"
    )


def test_a_tied_child_dies_with_a_killed_parent() -> None:
    with start(PARENT) as parent:
        child = psutil.Process(int(line(parent)))
        parent.kill()
        parent.wait(60)
        psutil.wait_procs([child], timeout=60)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_background_task_that_fails_ends_the_service() -> None:
    with start(BROKEN) as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out.split("\n") == ["second closed", "first closed", ""]
    assert "in sweep" in errors
    assert "task 'sweep' ended unexpectedly: KeyError: 'lease'" in errors


def test_tied_command_without_parent_does_not_start() -> None:
    command = tied_command(["/bin/true"])
    command[command.index(str(os.getpid()))] = "1999999999"
    assert subprocess.run(command, check=False).returncode == 1


def test_metrics_page() -> None:
    port = serve_metrics("127.0.0.1", 0).port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        assert b"process_resident_memory_bytes" in page.read()
    with pytest.raises(PortInUse, match=r"node\.metrics_port"):
        serve_metrics("127.0.0.1", port)


async def test_a_task_that_is_restarted_says_so_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a cancellation that nobody asked for, which is how calls on a closed channel end."""
    monkeypatch.setattr(vital, "_LONG_RUN_S", 0.0)
    ends: list[BaseException] = [KeyError("lease"), asyncio.CancelledError()]
    states: list[str] = []
    runs = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0)
        if ends:
            raise ends.pop(0)
        runs.set()
        await asyncio.Event().wait()

    task = vital.restarted(work, "watch node-7", "watch of nothing", lambda: states.append("lost"))
    async with asyncio.timeout(60):
        await runs.wait()
    assert states == ["lost", "lost"]
    assert caplog.text.count("task 'watch node-7' failed: a defect; it is started again in 0.1 s") == 2
    assert "KeyError: 'lease'" in caplog.text
    assert vital.task_failures.labels("watch of nothing")._value.get() == 2
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()


async def test_a_task_that_keeps_failing_is_restarted_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vital, "_LONGEST_PAUSE_S", 0.0)
    left = list(range(400))
    runs = asyncio.Event()

    async def work() -> None:
        if left:
            raise KeyError(left.pop())
        runs.set()
        await asyncio.Event().wait()

    task = vital.restarted(work, "watch node-8", "watch of much")
    async with asyncio.timeout(60):
        await runs.wait()
    assert not task.done()
    assert vital.task_failures.labels("watch of much")._value.get() == 400
    task.cancel()
    await asyncio.wait((task,))


async def test_a_vital_task_that_nobody_cancelled_has_failed() -> None:
    told = []

    async def work() -> None:
        await asyncio.sleep(0)
        raise asyncio.CancelledError

    asyncio.get_running_loop().set_exception_handler(lambda loop, facts: told.append(facts))
    task = vital.vital(work(), "sweep")
    await asyncio.wait((task,))
    await asyncio.sleep(0)
    assert [facts["message"] for facts in told] == ["task 'sweep' ended unexpectedly"]
