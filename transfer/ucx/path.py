"""A path to a peer by UCX: one-sided reads. Writes go through streams, where the peer sees them before they
land.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from transfer.attempt import Attempt, Direction
from transfer.descriptor import INCARNATION_NBYTES
from transfer.errors import PathFailed, PeerLost, RegionError
from transfer.lifeline import lifeline_parts
from transfer.memory import address_of
from transfer.peer_memory import LIFELINE_ID
from transfer.span import Spans, region_ids
from transfer.stream_path import StreamPath
from transfer.ucx import library as lib
from transfer.ucx.endpoint import Endpoint
from transfer.ucx.worker import UcxError, UcxWorker
from transfer.wire import RegionInfo

_CHUNK_NBYTES = 4 << 20
_CHUNK_ROWS = 256
_CHUNKS_IN_FLIGHT = 4
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
        writes: StreamPath,
    ) -> None:
        """peer: agent id and incarnation. region, known_region: what the peer says of one of its regions."""
        self._worker = worker
        self._agent_id, self._incarnation = peer
        self._region = region
        self._known_region = known_region
        self._writes = writes
        self._endpoint: Endpoint | None = None
        self._opening = asyncio.Lock()

    def chunking(self, direction: Direction, nbytes: int, observed: bool) -> tuple[int, int]:
        if direction == "write":
            return self._writes.chunking(direction, nbytes, observed)
        return _CHUNK_NBYTES, _CHUNK_ROWS

    async def open(self, direction: Direction, region_ids: Sequence[int]) -> None:
        if direction == "write":
            await self._writes.open(direction, region_ids)
            return
        async with self._opening:
            lifeline = await self._region(LIFELINE_ID)
            infos = [await self._region(region_id) for region_id in region_ids]
            try:
                lifeline_key, address = unpack_facts(lifeline.key)
                await self._on_worker(self._learn, address, [(LIFELINE_ID, lifeline_key)], infos)
            except (ValueError, UcxError) as error:
                raise PathFailed(self.name, str(error)) from error

    def _learn(self, address: bytes, keys: list[tuple[int, bytes]], infos: list[RegionInfo]) -> None:
        if self._endpoint is not None and (self._endpoint.closed or self._endpoint.failed):
            self._endpoint.close()
            self._endpoint = None
        if self._endpoint is None:
            self._endpoint = Endpoint(self._worker, address)
        for region_id, key in (*keys, *((info.id, info.key) for info in infos if info.open)):
            self._endpoint.learn(region_id, key)

    async def _on_worker(self, function: Callable[..., None], *arguments: Any) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            error: Exception | None = None
            try:
                function(*arguments)
            except Exception as failure:
                error = failure
            loop.call_soon_threadsafe(_settle, done, error)

        self._worker.submit(run)
        await done

    def start(self, attempt: Attempt) -> None:
        if attempt.direction == "write":
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
        self._worker.start(_Read(self, attempt, ids, bases))

    @property
    def endpoint(self) -> Endpoint | None:
        """For the progress thread."""
        return self._endpoint

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

    async def close(self) -> None:
        await self._writes.close()
        await self._on_worker(self._close_endpoint)

    def _close_endpoint(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class _Read:
    """One attempt on the progress thread: a ``Task``."""

    def __init__(self, path: UcxPath, attempt: Attempt, ids: list[int], bases: dict[int, int]) -> None:
        self._path = path
        self._attempt = attempt
        self._ids = ids
        self._bases = bases
        self._endpoint: Endpoint | None = None
        self._next = 0
        self._in_flight: deque[tuple[int, int]] = deque()  # (chunk, request of its flush, 0 when it is over)
        parts = lifeline_parts(ids)
        self._lifeline = np.zeros(sum(nbytes for _, nbytes in parts), np.uint8)
        self._kicked = False

    def _kick(self) -> None:
        self._kicked = True
        self._path._worker.wake()

    def step(self) -> bool:
        if self._endpoint is None and not self._begin():
            return True
        assert self._endpoint is not None
        try:
            if self._kicked or self._endpoint.failed or self._endpoint.closed:
                return self._broken(self._endpoint.failed)
            return self._post(self._endpoint) or self._collect(self._endpoint)
        except Exception as error:
            # Whatever it is, it is the batch's; but first nothing may be on its way into the spans.
            self._endpoint.close()
            self._leave(error)
            return True

    def _begin(self) -> bool:
        self._endpoint = self._path.endpoint
        if self._endpoint is None or not all(map(self._endpoint.knows, (LIFELINE_ID, *self._ids))):
            self._attempt.stop(PathFailed("ucx", "its connection broke", interrupted=True))
            return False
        return self._attempt.enter(self._kick)

    def _post(self, endpoint: Endpoint) -> bool:
        """Keep chunks on their way; behind the last one the lifeline. True when that broke the attempt."""
        chunks = len(self._attempt.plan.chunks)
        while self._next <= chunks and len(self._in_flight) < _CHUNKS_IN_FLIGHT:
            if self._next == chunks:
                if self._in_flight:
                    # The lifeline is looked at when all bytes are here, not before.
                    return False
                status = self._post_lifeline(endpoint)
            else:
                status = self._post_chunk(endpoint, self._next)
            request = 0
            if status == lib.OK:
                status, request = endpoint.flush()
            if status < 0:
                return self._broken(status)
            self._in_flight.append((self._next, request))
            self._next += 1
        return False

    def _post_chunk(self, endpoint: Endpoint, chunk: int) -> int:
        rows = self._attempt.rows(chunk)
        columns = rows.address.tolist(), rows.nbytes.tolist(), rows.offset.tolist(), rows.region.tolist()
        by_region: dict[int, list[tuple[int, int, int]]] = {}
        for here, nbytes, offset, region_id in zip(*columns, strict=True):
            by_region.setdefault(region_id, []).append((here, nbytes, self._bases[region_id] + offset))
        for region_id, gets in by_region.items():
            if (status := endpoint.get(region_id, gets)) != lib.OK:
                return status
        return lib.OK

    def _post_lifeline(self, endpoint: Endpoint) -> int:
        gets, here = [], address_of(self._lifeline)
        for offset, nbytes in lifeline_parts(self._ids):
            gets.append((here, nbytes, self._bases[LIFELINE_ID] + offset))
            here += nbytes
        return endpoint.get(LIFELINE_ID, gets)

    def _collect(self, endpoint: Endpoint) -> bool:
        while self._in_flight:
            chunk, request = self._in_flight[0]
            status = endpoint.check(request) if request else lib.OK
            if status == lib.IN_PROGRESS:
                return False
            self._in_flight.popleft()
            if status < 0:
                return self._broken(status)
            if chunk == len(self._attempt.plan.chunks):
                self._path.conclude(self._ids, self._lifeline.tobytes())
                self._attempt.leave(self._kick, chunks=chunk)
                return True
            spans = self._attempt.arrived(chunk)
            self._attempt.verify_arrival(spans)
            self._attempt.announce(spans)
        return False

    def _broken(self, status: int) -> bool:
        assert self._endpoint is not None
        self._endpoint.close()
        self._leave(PathFailed("ucx", f"its connection broke (status {status})", interrupted=status == 0))
        return True

    def _leave(self, error: Exception) -> None:
        for _, request in self._in_flight:
            if request:
                assert self._endpoint is not None
                self._endpoint.check(request)
        self._in_flight.clear()
        self._attempt.leave(self._kick, error=error)
