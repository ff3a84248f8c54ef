"""Moonpool's own side of the benchmark: an agent here, connected to one in another process."""

from __future__ import annotations

import time

import psutil

from moonpool.bench.transfer.batch_shape import Shape
from moonpool.transfer import Peer, Region, Spans, checksum


class Ours:
    """A ``Contestant``: batches over one connected peer, verified or not."""

    def __init__(self, peer: Peer, pool: Region, remote: int, checksums: bool, cpu: CpuClock) -> None:
        """remote: the region at the peer, as large as ``pool``; both hold zeros."""
        self.name = "moonpool"
        self.peer = peer
        self.checksums = checksums
        self._pool = pool
        self._remote = remote
        self._pairs: list[tuple[Spans, Spans]] = []
        self._sums: list[int] | None = None
        self._direction = "read"
        self.cpu_seconds = cpu.seconds

    async def prepare(self, shape: Shape) -> None:
        pool = self._pool
        ours, theirs = shape.spans(pool.id, pool.nbytes, 0), shape.spans(self._remote, pool.nbytes, 1)
        self._pairs = list(zip(ours, theirs, strict=True))
        self._sums = [checksum(bytes(shape.block_nbytes))] * shape.batch if self.checksums else None
        self._direction = shape.direction

    async def move(self, seconds: float) -> list[float]:
        took: list[float] = []
        await self._pass()
        until = time.perf_counter() + seconds
        while not took or time.perf_counter() < until:
            started = time.perf_counter()
            await self._pass()
            took.append(time.perf_counter() - started)
        return took

    async def _pass(self) -> None:
        post = self.peer.read if self._direction == "read" else self.peer.write
        batches = [post(here, there, deadline_s=30, checksums=self._sums) for here, there in self._pairs]
        for batch in batches:
            await batch


class CpuClock:
    """Processor seconds of this process and the target together."""

    def __init__(self, target_pid: int) -> None:
        self._target = psutil.Process(target_pid)

    def seconds(self) -> float:
        times = self._target.cpu_times()
        return time.process_time() + float(times.user + times.system)
