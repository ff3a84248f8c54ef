"""What carries the lines between a leader and one of its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from typing import Protocol

from moonpool.runtime.service.spawn import Process, spawn

_MAX_LINE_NBYTES = 64 << 20


class RankChannel(Protocol):
    """Of one process, from its start to its end. ``where``: the machine it runs on, empty for ours; ``pid``:
    there."""

    where: str

    @property
    def pid(self) -> int: ...

    def send(self, line: bytes) -> None:
        """One command, as a line of JSON. Goes nowhere when the process is gone."""
        ...

    def lines(self) -> AsyncIterator[bytes]:
        """Its reports, each a line of JSON, until it is gone."""
        ...

    async def wait(self) -> str:
        """Until it is gone; how it ended, as "it ended by signal 9"."""
        ...

    def kill(self) -> None:
        """End it, also where it is stopped. Idempotent."""
        ...


class PipeChannel:
    """A child of ours, tied to us; its log goes where ours goes."""

    where = ""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, rank: int, threads: int) -> PipeChannel:
        """Returns as soon as the process is there; it may still be importing. Call it on a thread that lives
        as long as the process should: it is tied to it."""
        environment = {
            **os.environ,
            "MOONPOOL_RANK": str(rank),
            # Idle OpenMP threads that spin take the cores from the other ranks.
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
