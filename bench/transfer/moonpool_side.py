"""Moonpool's own side: an agent of this process, connected to one in another process."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.bench.harness.turns import repeat
from moonpool.bench.transfer.shapes import Shape
from moonpool.transfer import Peer, Region, Spans, checksum


class MoonpoolSide:
    """A ``Contestant``: batches over one connected peer, verified or not."""

    def __init__(
        self, peer: Peer, pool: Region, remote: int, checksums: bool, cpu_s: Callable[[], float]
    ) -> None:
        """remote: the region at the peer, as large as ``pool``; both hold zeros."""
        self.name = f"checksum-{'on' if checksums else 'off'}"
        self.peer = peer
        self.cpu_s = cpu_s
        self._checksums = checksums
        self._pool = pool
        self._remote = remote
        self._pairs: list[tuple[Spans, Spans]] = []
        self._sums: list[int] | None = None
        self._direction = "read"

    async def prepare(self, shape: Shape) -> None:
        pool = self._pool
        ours, theirs = shape.spans(pool.id, pool.nbytes, 0), shape.spans(self._remote, pool.nbytes, 1)
        self._pairs = list(zip(ours, theirs, strict=True))
        self._sums = [checksum(bytes(shape.block_nbytes))] * shape.batch if self._checksums else None
        self._direction = shape.direction

    async def move(self, seconds: float) -> list[float]:
        return await repeat(self._pass, seconds)

    async def _pass(self) -> None:
        post = self.peer.read if self._direction == "read" else self.peer.write
        batches = [post(here, there, deadline_s=30, checksums=self._sums) for here, there in self._pairs]
        for batch in batches:
            await batch
