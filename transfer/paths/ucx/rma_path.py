"""A path to a peer by UCX: one-sided reads. For a write the peer is asked, through a stream, to read from
us: so nothing ever lands in memory that its owner has closed.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from moonpool.transfer.connections.descriptor import INCARNATION_NBYTES
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.attempt import Attempt, Direction
from moonpool.transfer.copying.peer_memory import LIFELINE_ID
from moonpool.transfer.errors import PathFailed, PeerLost, RegionError
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.span import Spans, region_ids
from moonpool.transfer.paths.tcp.stream_path import StreamPath
from moonpool.transfer.paths.ucx.endpoint import Endpoint
from moonpool.transfer.paths.ucx.rma_read import Read
from moonpool.transfer.paths.ucx.worker import UcxError, UcxWorker

_CHUNK_NBYTES = 4 << 20
_CHUNK_ROWS = 256
_LENGTH = struct.Struct("<H")


def pack_facts(lifeline_key: bytes, worker_address: bytes) -> bytes:
    """What a peer needs to connect: the key of the ``RegionInfo`` of ``LIFELINE_ID``."""
    return _LENGTH.pack(len(lifeline_key)) + lifeline_key + worker_address


def unpack_facts(facts: bytes) -> tuple[bytes, bytes]:
    """(key of the lifeline, address of the worker). Raises ValueError."""
    if len(facts) <= _LENGTH.size:
        raise ValueError("the peer has no UCX")
    (nbytes,) = _LENGTH.unpack_from(facts)
    return facts[_LENGTH.size : _LENGTH.size + nbytes], facts[_LENGTH.size + nbytes :]


class UcxPath:
    """A ``Path``. The target need not do anything over RDMA; over TCP and shared memory its worker
    answers.
    """

    name = "ucx"
    networked = True

    def __init__(
        self,
        worker: UcxWorker,
        peer: tuple[str, bytes],
        region: Callable[[int], Awaitable[RegionInfo]],
        known_region: Callable[[int], RegionInfo | None],
        writes: StreamPath | None,
    ) -> None:
        """peer: agent id and incarnation. region, known_region: what the peer says of one of its regions.
        writes: None for a peer that is only read.
        """
        self._worker = worker
        self._agent_id, self._incarnation = peer
        self._region = region
        self._known_region = known_region
        self._writes = writes
        self._endpoint: Endpoint | None = None
        self._opening = asyncio.Lock()

    def carries(self, direction: Direction, ours: Sequence[Region], theirs: Sequence[RegionInfo]) -> bool:
        # It would find out by itself what lies at an address, and copy by the processor where it is not sure.
        return all(region.device is None for region in ours) and not any(
            region.on_device for region in theirs
        )

    def chunking(self, direction: Direction, nbytes: int, observed: bool) -> Chunking:
        if direction == "write":
            assert self._writes is not None
            return self._writes.chunking(direction, nbytes, observed)
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
                lifeline_key, address = unpack_facts(lifeline.key)
                await self._worker.run(self._learn, address, [(LIFELINE_ID, lifeline_key)], infos)
            except (ValueError, UcxError) as error:
                raise PathFailed(self.name, str(error)) from error

    def _ready(self, region_ids: Sequence[int]) -> bool:
        """Whether a read could start now, as far as this thread can see; the read looks again. Saves a hop
        to the progress thread and back.
        """
        endpoint = self._endpoint
        if endpoint is None or endpoint.closed or endpoint.failed:
            return False
        return all(map(endpoint.knows, region_ids))

    def _learn(self, address: bytes, keys: list[tuple[int, bytes]], infos: list[RegionInfo]) -> None:
        if self._endpoint is not None and (self._endpoint.closed or self._endpoint.failed):
            self._endpoint.close()
            self._endpoint = None
        if self._endpoint is None:
            self._endpoint = Endpoint(self._worker, address)
        for region_id, key in (*keys, *((info.id, info.key) for info in infos if info.open)):
            self._endpoint.learn(region_id, key)

    def start(self, attempt: Attempt) -> None:
        if attempt.direction == "write":
            assert self._writes is not None
            self._writes.start(attempt)
            return
        rows = attempt.plan.rows
        ids = region_ids(Spans(rows.region, rows.offset, rows.nbytes))
        infos = {LIFELINE_ID: self._known_region(LIFELINE_ID)}
        for region_id in ids:
            infos[region_id] = self._known_region(region_id)
            if infos[region_id] is None:
                attempt.stop(RegionError(region_id, "was closed by its owner"))
                return
        bases = {region_id: info.address for region_id, info in infos.items() if info is not None}
        self._worker.start(Read(self, attempt, ids, bases))

    @property
    def endpoint(self) -> Endpoint | None:
        """For the progress thread."""
        return self._endpoint

    def wake(self) -> None:
        self._worker.wake()

    def conclude(self, region_ids: Sequence[int], lifeline: bytes) -> None:
        """Raises the TransferError that a read ends with although all bytes arrived."""
        if lifeline[:INCARNATION_NBYTES] != self._incarnation:
            raise PeerLost(self._agent_id, "its memory belongs to another process")
        open_ids = np.frombuffer(lifeline, np.uint32, offset=INCARNATION_NBYTES).tolist()
        for region_id, open_id in zip(region_ids, open_ids, strict=True):
            if region_id != open_id:
                raise RegionError(region_id, "was closed by its owner during the read")

    def forget(self, region_id: int) -> None:
        """The peer closed the region."""

        def run() -> None:
            if self._endpoint is not None:
                self._endpoint.forget(region_id)

        self._worker.submit(run)

    def progress(self, attempt: Attempt) -> dict[object, int]:
        # What the peer fetches for a write, it watches itself.
        return {self: attempt.chunks_left} if attempt.direction == "read" else {}

    def drop(self, carriers: object) -> bool:
        return False

    async def close(self) -> None:
        if self._writes is not None:
            await self._writes.close()
        await self._worker.run(self._close_endpoint)

    def _close_endpoint(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
