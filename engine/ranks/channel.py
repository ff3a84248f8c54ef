"""The channel of commands and reports between a leader and one rank."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from typing import Protocol

from moonpool.runtime.service.spawn import Process, spawn

RANK = "MOONPOOL_RANK"
"""The variable that tells a child its rank."""
_MAX_LINE_NBYTES = 64 << 20


class RankChannel(Protocol):
    """The channel to one process. ``where``: its machine, empty for this one; ``pid``: on that machine."""

    where: str

    @property
    def pid(self) -> int: ...

    def send(self, line: bytes) -> None:
        """Send a command, a line of JSON. Does nothing when the process has ended."""
        ...

    def lines(self) -> AsyncIterator[bytes]:
        """Yield reports, each a line of JSON, until the process ends."""
        ...

    async def wait(self) -> str:
        """Wait for the end; return a text such as "it ended by signal 9"."""
        ...

    def kill(self) -> None:
        """End the process, even a stopped one. Idempotent."""
        ...


class PipeChannel:
    """A child process tied to this one, with the same log."""

    where = ""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, rank: int, threads: int) -> PipeChannel:
        """Start the process; it may still be importing. Call it on a thread that outlives the process: the
        process is tied to it."""
        environment = {
            **os.environ,
            RANK: str(rank),
            # Spinning idle OpenMP threads would take the cores of other ranks.
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        return cls(
            await spawn(
                [sys.executable, "-m", "moonpool.engine.ranks.worker"],
                environment=environment,
                stdin=True,
                limit_nbytes=_MAX_LINE_NBYTES,
            )
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)

    async def lines(self) -> AsyncIterator[bytes]:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield line

    async def wait(self) -> str:
        code = await self._process.wait()
        return f"it ended by signal {-code}" if code < 0 else f"it ended with code {code}"

    def kill(self) -> None:
        if self._process.returncode is None:
            # SIGTERM would not end a stopped process.
            self._process.kill()
