"""A forked process is what ``exec`` would have made, sooner, and ends with the process that asked for it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonpool.runtime.service import fork_server as fork_server_module
from moonpool.runtime.service.child import Child
from moonpool.runtime.service.fork_server import ForkServer
from moonpool.runtime.service.spawn import spawn
from tests.processes import stop

pytestmark = pytest.mark.timeout(120)
MODULE = "tests.runtime.fork_target"
PRELOAD = {MODULE: ["xml.dom.minidom"]}

# A parent that starts one process, tells its facts, and waits to be killed.
PARENT = """
import asyncio, os, sys
from moonpool.runtime.service.fork_server import use_fork_servers
from moonpool.runtime.service.spawn import spawn
from tests.processes import stop
async def main():
    use_fork_servers({"tests.runtime.fork_target": ["xml.dom.minidom"]})
    command = [sys.executable, "-m", "tests.runtime.fork_target", *sys.argv[1:]]
    process = await spawn(command, environment=os.environ)
    print((await process.stdout.readline()).decode(), end="", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ForkServer:
    # Some tests leave the repository's folder, and the module that is run is not installed.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    server = ForkServer(PRELOAD)
    monkeypatch.setattr(fork_server_module, "_current", (server,))
    return server


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", MODULE, *words]


async def facts_of(code: str, **environment: str) -> dict[str, Any]:
    """What a process says that ends with ``code``, if it is not killed before."""
    process = await spawn(command("facts", code), environment={**os.environ, **environment})
    assert process.stdout is not None
    facts: dict[str, Any] = json.loads(await process.stdout.readline())
    assert facts["pid"] == process.pid
    # Not process.kill(): where the process has just ended, that collects its code, and asyncio says 255.
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() in (int(code), -signal.SIGKILL)
    return facts


def is_gone(pid: int) -> bool:
    try:
        psutil.wait_procs([psutil.Process(pid)], timeout=60)
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.usefixtures("server")
async def test_it_is_what_exec_would_have_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    forked = await facts_of("1", COLOUR="green")
    monkeypatch.setattr(fork_server_module, "_current", ())
    executed = await facts_of("1", COLOUR="green")
    assert forked["preloaded"]
    assert not executed["preloaded"]
    for facts in (forked, executed):
        assert facts["session"] == facts.pop("pid")
        del facts["session"], facts["preloaded"], facts["frozen"]
    assert len(forked.pop("files")) == len(executed.pop("files")) + 1  # its way to the server
    assert forked == executed


@pytest.mark.usefixtures("server")
async def test_exit_codes_and_streams(tmp_path: Path) -> None:
    async def run(*words: str, given: bytes = b"") -> tuple[int, bytes, str]:
        with (tmp_path / "stderr").open("w+b") as stderr:
            process = await spawn(
                command(*words), environment=os.environ, stdin=bool(given), stderr=stderr.fileno()
            )
            if process.stdin is not None:
                process.stdin.write(given)
                process.stdin.close()
            assert process.stdout is not None
            output = await process.stdout.read()
            code = await process.wait()
            assert process.returncode == code
            stderr.seek(0)
            return code, output, stderr.read().decode()

    assert await run("0") == (0, b"", "")
    assert await run("complain", "7") == (7, b"", "something is wrong\n")
    assert await run("echo", given=b"louder") == (0, b"LOUDER\n", "")
    assert await run("slow-end") == (0, b"at exit\n", "")
    code, _, said = await run("fail")
    assert code == 1
    assert "ValueError: as asked" in said


@pytest.mark.usefixtures("server")
async def test_many_at_once_end_each_by_itself(tmp_path: Path) -> None:
    async def one(number: int) -> int:
        child = Child(
            f"child {number}", command("facts", str(number)), tmp_path / f"{number}", sends_json=True
        )
        await child.start()
        await child.wait_ready(60)
        return await child.wait()

    assert await asyncio.gather(*(one(number) for number in range(20))) == list(range(20))


@pytest.mark.usefixtures("server")
async def test_signals_reach_it(tmp_path: Path) -> None:
    child = Child("sleeper", command("facts", "sleep"), tmp_path / "log", sends_json=True)
    for end, code in ((child.terminate, -signal.SIGTERM), (child.kill, -signal.SIGKILL)):
        await child.start()
        await child.wait_ready(60)
        assert child.ready["preloaded"]
        end()
        assert await child.wait() == code
        end()


def test_what_was_imported_is_searched_for_no_garbage_also_while_the_server_imports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    monkeypatch.setenv("LOAD_WHEN", str(go))
    server = ForkServer({"first": ["tests.runtime.waits_to_load"], **PRELOAD, "last": ["xml.sax"]})
    read, write = os.pipe()
    with server.ask(command("facts", "0"), os.environ, [0, write, 2]), open(read) as told:
        os.close(write)
        go.touch()
        facts = json.loads(told.readline())
    assert facts["preloaded"]
    assert facts["frozen"] > 10_000


@pytest.mark.parametrize("words", [("facts", "sleep"), ("another",)])
def test_it_dies_with_the_process_that_asked(words: tuple[str, ...]) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, *words], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        facts = json.loads(parent.stdout.readline())
        pids = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
        parent.kill()
    assert facts["preloaded"]
    assert facts["pid"] in pids
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.usefixtures("server")
async def test_a_process_asked_for_by_a_forked_one_ends_with_it() -> None:
    process = await spawn(command("another"), environment=os.environ)
    assert process.stdout is not None
    facts = json.loads(await process.stdout.readline())
    assert facts["preloaded"]
    assert facts["pid"] != process.pid
    stop(facts["pid"])  # it could not notice by itself
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    assert await asyncio.to_thread(is_gone, facts["pid"])


async def test_without_its_server_it_is_killed_and_the_next_one_is_executed(
    server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    process = await spawn(command("facts", "sleep"), environment=os.environ)
    assert process.stdout is not None
    await process.stdout.readline()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    assert await asyncio.to_thread(is_gone, process.pid)
    assert not (await facts_of("1"))["preloaded"]
    assert "is started by exec: the fork server failed" in caplog.text


async def test_a_fork_that_fails_ends_no_other_process(
    server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    first = await spawn(command("facts", "sleep"), environment=os.environ)
    assert first.stdout is not None
    await first.stdout.readline()
    assert server.pid is not None
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    files = {int(name) for name in os.listdir(f"/proc/{server.pid}/fd")}
    # A request has four files, and a process needs two more.
    for room in (0, 3, 4, 5):
        limit = next(islice((number for number in count() if number not in files), room, None))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limits[1]))
        assert not (await facts_of("0"))["preloaded"]
    assert caplog.text.count("is started by exec: the fork server failed") == 4
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    assert (await facts_of("0"))["preloaded"]
    assert first.returncode is None
    while {int(name) for name in os.listdir(f"/proc/{server.pid}/fd")} != files:  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # the last process is not reaped yet; nothing else is left open
    first.kill()
    assert await first.wait() == -signal.SIGKILL


async def test_cancelled_while_it_starts_it_is_killed(server: ForkServer) -> None:
    starting = asyncio.create_task(spawn(command("sleep"), environment=os.environ))
    while server.pid is None:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    # It was not forked yet, or is ended: both are so when the server has answered the next one.
    await facts_of("0")
    while psutil.Process(server.pid).children():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_one_that_is_given_up_unread_ends_alone(server: ForkServer) -> None:
    other = await spawn(command("facts", "sleep"), environment=os.environ)
    assert other.stdout is not None
    await other.stdout.readline()
    with Path(os.devnull).open("r+b") as null:
        status = server.ask(command("sleep"), os.environ, [null.fileno()] * 3)
    readable = asyncio.Event()
    asyncio.get_running_loop().add_reader(status, readable.set)
    await readable.wait()
    asyncio.get_running_loop().remove_reader(status)
    status.close()  # the server has told of the process, and nobody has read it
    assert (await facts_of("0"))["preloaded"]
    assert other.returncode is None
    while len(psutil.Process(server.pid).children()) > 1:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)
    other.kill()
    assert await other.wait() == -signal.SIGKILL


async def test_servers_side_by_side_fork_each_what_it_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    servers = (ForkServer({"json.tool": ["xml.sax"]}), ForkServer(PRELOAD))
    monkeypatch.setattr(fork_server_module, "_current", servers)
    assert (await facts_of("3"))["preloaded"]
    assert servers[0].pid is None, "nobody asked it"
    tool = await spawn([sys.executable, "-m", "json.tool"], environment=os.environ, stdin=True)
    assert tool.stdin is not None
    assert tool.stdout is not None
    tool.stdin.write(b"[1]")
    tool.stdin.close()
    assert json.loads(await tool.stdout.read()) == [1]
    assert servers[0].pid not in (None, servers[1].pid)


def test_what_a_library_reads_when_it_is_loaded_is_not_served_otherwise() -> None:
    server = ForkServer(PRELOAD)
    assert server.serves(command("1"), os.environ)
    assert server.serves(command("1"), {**os.environ, "COLOUR": "green", "OMP_NUM_THREADS": "3"})
    assert server.serves(command("1"), {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    for name in ("OMP_WAIT_POLICY", "LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "MOONPOOL_KERNELS"):
        assert not server.serves(command("1"), {**os.environ, name: "other"})
    assert not server.serves([sys.executable, "-m", "json.tool"], os.environ)
    assert not server.serves(["/bin/true"], os.environ)
