"""Child processes: peers in their own Python, our daemons, and our code in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from moonpool.bench.harness import child_main
from moonpool.bench.harness.peers import PeerFailed, python_of
from moonpool.runtime.service.tied_command import tied_command

_READY_S, _ANSWER_S, _STOP_S = 300.0, 120.0, 15.0
_MAX_ANSWER_NBYTES = 1 << 24


class Child:
    """A process, and the processes that it starts. ``ready``: what its first line said."""

    def __init__(self, name: str, process: Process, log: Path, paused: bool) -> None:
        self.name = name
        self.ready: Any = None
        self._process = process
        self._log = log
        self._paused = paused

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Processor seconds of the process itself since its start."""
        return cpu_s_of(self.pid)

    def rss_nbytes(self) -> int:
        """Memory of the process itself."""
        import psutil

        return int(psutil.Process(self.pid).memory_info().rss)

    async def call(self, method: str, **keywords: Any) -> Any:
        """Call a method of the child's object. Raises ``PeerFailed``."""
        assert self._process.stdin is not None
        with self.turn():
            self._process.stdin.write(json.dumps({"call": method, **keywords}).encode() + b"\n")
            return await self.answer(_ANSWER_S)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The process runs during the block, if it is paused otherwise."""
        if self._paused:
            self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            if self._paused:
                self.signal(signal.SIGSTOP)

    async def answer(self, timeout_s: float) -> Any:
        """The next line of its output. Raises ``PeerFailed`` with the end of the log."""
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise PeerFailed(
                f"{self.name} did not answer within {timeout_s:g} s; {self._log_tail()}"
            ) from None
        if not line.startswith(b"{"):
            code = await self._process.wait()
            raise PeerFailed(f"{self.name} ended with code {code}; {self._log_tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return answer.get("result", answer)

    def check_runs(self) -> None:
        """Raises ``PeerFailed`` if it has ended."""
        if self._process.returncode is not None:
            raise PeerFailed(f"{self.name} ended with code {self._process.returncode}; {self._log_tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to all that it started. Nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL; returns when it has ended."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        self.signal(signal.SIGKILL)
        await self._process.wait()

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["(empty)"]
        errors = [line for line in lines if "Error" in line]
        return f"its log ends with: {(errors or lines)[-1][:300]}"


def cpu_s_of(pid: int) -> float:
    """Processor seconds of a process since its start, without those of its children."""
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def cpu_s_of_children(pid: int | None = None) -> float:
    """Processor seconds of all processes that this one, or ``pid``, has started, and of theirs."""
    import psutil

    return sum(cpu_s_of(child.pid) for child in psutil.Process(pid).children(recursive=True))


@asynccontextmanager
async def started(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    paused: bool = False,
    prints_ready: bool = True,
    first_input: str = "",
) -> AsyncIterator[Child]:
    """Run a command around the block. It cannot outlive this process.

    prints_ready: its first line of output is JSON, printed when it is ready. paused: outside of ``turn`` and
    ``call`` it is stopped (SIGSTOP), from the ready line on; threads that poll would take a core from others.

    Raises:
        PeerFailed: it ended before it was ready.
    """
    with tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log") as log:
        process = await asyncio.create_subprocess_exec(
            *tied_command(command),
            stdin=PIPE,
            stdout=PIPE if prints_ready else log,
            stderr=log,
            env={**os.environ, **(environment or {})},
            limit=_MAX_ANSWER_NBYTES,
            start_new_session=True,
        )
        child = Child(name, process, Path(log.name), paused)
        assert process.stdin is not None
        process.stdin.write(first_input.encode())
        try:
            if prints_ready:
                child.ready = await child.answer(_READY_S)
                if paused:
                    child.signal(signal.SIGSTOP)
            yield child
        finally:
            await child.stop()


@asynccontextmanager
async def served(
    name: str,
    target: str | Path,
    class_name: str,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    paused: bool = False,
    **keywords: Any,
) -> AsyncIterator[Child]:
    """An object of ours or of a peer in a child, for ``Child.call``: see ``child_main``."""
    # -P: the script's folder must not hide packages of the same names.
    command = [python, "-P", child_main.__file__, f"{target}:{class_name}"]
    given = json.dumps(keywords) + "\n"
    async with started(name, command, environment=environment, paused=paused, first_input=given) as child:
        yield child


@asynccontextmanager
async def peer(
    name: str,
    file: Path,
    class_name: str,
    *,
    label: str = "",
    environment: Mapping[str, str] | None = None,
    paused: bool = True,
    **keywords: Any,
) -> AsyncIterator[Child]:
    """A class of ``file`` in the Python environment of the peer ``name``. ``label``: its name in errors.

    Raises:
        PeerAbsent: the environment does not exist.
        PeerFailed: it did not start.
    """
    python = str(python_of(name))
    # Our folders must not hide its packages.
    clean = {**(environment or {}), "PYTHONPATH": ""}
    run = served(label or name, file, class_name, python=python, environment=clean, paused=paused, **keywords)
    async with run as child:
        yield child
