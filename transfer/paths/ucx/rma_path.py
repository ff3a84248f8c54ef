"""The path by UCX: one-sided reads.

For a write the peer is asked, through a stream, to read from us. So nothing is ever written to memory that
its owner has closed. Written bytes that fit the message travel in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from moonpool.transfer.connections.handshake import Identity
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.batch_request import Direction
from moonpool.transfer.copying.peer_memory import LIFELINE_ID
from moonpool.transfer.errors import PathFailed
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.span import Spans, region_ids
from moonpool.transfer.paths.base import NOT_WRITTEN, Path, WrittenNow, known_regions
from moonpool.transfer.paths.tcp.stream_path import StreamPath
from moonpool.transfer.paths.ucx.endpoint import Endpoint
from moonpool.transfer.paths.ucx.mapped_regions import unpack_worker_address
from moonpool.transfer.paths.ucx.rma_read import Read
from moonpool.transfer.paths.ucx.worker import UcxError, UcxWorker

_CHUNK_NBYTES = 4 << 20
_CHUNK_ROWS = 256


class UcxPath(Path):
    """Over RDMA the target does nothing. Over TCP and shared memory its UCX worker answers."""

    name = "ucx"
    networked = True

    def __init__(
        self,
        worker: UcxWorker,
        peer: Identity,
        region: Callable[[int], Awaitable[RegionInfo]],
        known_region: Callable[[int], RegionInfo | None],
        writes: StreamPath | None,
    ) -> None:
        """region, known_region: of the peer's ``Control``. writes: None for a peer that is only read."""
        self._worker = worker
        self._peer = peer
        self._region = region
        self._known_region = known_region
        self._writes = writes
        self._endpoint: Endpoint | None = None
        self._opening = asyncio.Lock()

    def carries(self, direction: Direction, ours: Sequence[Region], theirs: Sequence[RegionInfo]) -> bool:
        # UCX detects the kind of memory at an address, and copies by the processor where it is not sure.
        return all(region.device is None for region in ours) and not any(
            region.on_device for region in theirs
        )

    def chunking(
        self, direction: Direction, nbytes: int, verified: bool, region_ids: Sequence[int]
    ) -> Chunking:
        if direction == "write":
            assert self._writes is not None
            return self._writes.chunking(direction, nbytes, verified, region_ids)
        return Chunking(_CHUNK_NBYTES, _CHUNK_ROWS)

    async def open(self, direction: Direction, region_ids: Sequence[int]) -> None:
        if direction == "write":
            assert self._writes is not None
            await self._writes.open(direction, region_ids)
            return
        async with self._opening:
            lifeline = await self._region(LIFELINE_ID)
            infos = [await self._region(region_id) for region_id in region_ids]
            if self._ready(region_ids):
                return
            try:
                lifeline_key, address = unpack_worker_address(lifeline.key)
                await self._worker.run(self._learn, address, [(LIFELINE_ID, lifeline_key)], infos)
            except (ValueError, UcxError) as error:
                raise PathFailed(self.name, str(error)) from error

    def write_now(
        self, region: Region, local: Spans, remote: Spans, checksums: bytes | None, grant: int
    ) -> WrittenNow:
        if self._writes is None:
            return NOT_WRITTEN
        return self._writes.write_now(region, local, remote, checksums, grant)

    def _ready(self, region_ids: Sequence[int]) -> bool:
        """Whether a read could start now. Saves a hop to the progress thread; the read checks again there."""
        endpoint = self._endpoint
        if endpoint is None or endpoint.closed or endpoint.failed or self._worker.stopped:
            return False
        return all(map(endpoint.knows, region_ids))

    def _learn(self, address: bytes, keys: list[tuple[int, bytes]], infos: list[RegionInfo]) -> None:
        endpoint = self._endpoint
        if endpoint is not None and (endpoint.closed or endpoint.failed or self._worker.stopped):
            endpoint.close()
            self._endpoint = None
        if self._endpoint is None:
            self._endpoint = Endpoint(self._worker, address)
        for region_id, key in (*keys, *((info.id, info.key) for info in infos if info.open)):
            self._endpoint.learn(region_id, key)

    def start(self, attempt: Attempt) -> None:
        if attempt.request.direction == "write":
            assert self._writes is not None
            self._writes.start(attempt)
            return
        ids = region_ids(attempt.plan.rows.remote_spans)
        infos = known_regions((LIFELINE_ID, *ids), self._known_region, attempt)
        if infos is None:
            return
        bases = {info.id: info.address for info in infos}
        self._worker.start(Read(self._worker, self._peer, lambda: self._endpoint, attempt, ids, bases))

    def forget(self, region_id: int) -> None:
        """The peer closed the region."""

        def run() -> None:
            if self._endpoint is not None:
                self._endpoint.forget(region_id)

        self._worker.submit(run)

    def progress(self, attempt: Attempt) -> dict[object, int]:
        # The peer fetches the bytes of a write, and watches that itself.
        return {self: attempt.num_arrived} if attempt.request.direction == "read" else {}

    async def close(self) -> None:
        if self._writes is not None:
            await self._writes.close()
        await self._worker.run(self._close_endpoint)

    def _close_endpoint(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
