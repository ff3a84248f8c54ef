"""Bytes between two processes of one host: reads straight from the peer's memory, writes fetched by the
peer.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence

import numpy as np

from moonpool.transfer.connections.descriptor import INCARNATION_NBYTES
from moonpool.transfer.connections.handshake import Identity
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.attempt import Attempt, Direction
from moonpool.transfer.copying.job import CopyJob, copy_chunking
from moonpool.transfer.copying.peer_memory import PeerMemory
from moonpool.transfer.copying.pool import CopyPool
from moonpool.transfer.errors import PathFailed, PeerLost, RegionError
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.span import Spans, region_ids
from moonpool.transfer.paths.tcp.stream_path import StreamPath


class ShmPath:
    """A ``Path`` that copies memory.

    A read needs nothing of the peer but that it lives: it may be busy, or stopped. A write is a request that
    the peer copy from us, so that it is the peer who decides, at that moment, that the memory may be written.
    """

    name = "shm"
    networked = False

    def __init__(
        self,
        pool: CopyPool,
        peer: Identity,
        memory: PeerMemory,
        region: Callable[[int], RegionInfo | None],
        streams: StreamPath | None,
    ) -> None:
        """region: what is known of one. streams: over a Unix socket, for writes and for memory out of
        reach; None where it comes to neither.
        """
        self._pool = pool
        self._peer = peer
        self._memory = memory
        self._region = region
        self._streams = streams
        self._unreachable: set[int] = set()

    def carries(self, direction: Direction, ours: Sequence[Region], theirs: Sequence[RegionInfo]) -> bool:
        return True

    def chunking(self, direction: Direction, nbytes: int, observed: bool) -> Chunking:
        if self._streams is not None and (direction == "write" or self._unreachable):
            return self._streams.chunking(direction, nbytes, observed)
        return copy_chunking(nbytes, observed)

    async def open(self, direction: Direction, region_ids: Sequence[int]) -> None:
        if direction == "read":
            for region_id in region_ids:
                info = self._region(region_id)
                if info is not None and not await self._memory.reach(info):
                    self._unreachable.add(region_id)
        if self._streams is not None and (direction == "write" or self._unreachable.intersection(region_ids)):
            await self._streams.open(direction, region_ids)

    def start(self, attempt: Attempt) -> None:
        rows = attempt.plan.rows
        ids = region_ids(Spans(rows.region, rows.offset, rows.nbytes))
        if self._streams is not None and (
            attempt.direction == "write" or self._unreachable.intersection(ids)
        ):
            self._streams.start(attempt)
            return
        infos: list[RegionInfo] = []
        for region_id in ids:
            info = self._region(region_id)
            if info is None:
                attempt.stop(RegionError(region_id, "was closed by its owner"))
                return
            infos.append(info)
        located = self._memory.locate(infos, attempt.hold)
        attempt.afterwards(located.keep.clear)
        CopyJob(
            attempt,
            rows.address,
            rows.based(located.bases),
            located.copy,
            conclude=functools.partial(self._conclude, ids),
            waits=attempt.hold.device is not None or any(info.on_device for info in infos),
        ).start(self._pool)

    def _conclude(self, region_ids: list[int], failure: OSError | None) -> None:
        """Was that the peer's memory, and its region, to the end? Region ids are never used twice."""
        try:
            lifeline = self._memory.lifeline(region_ids)
        except OSError as error:
            raise PeerLost(self._peer.agent_id, f"its memory is gone ({error})") from error
        if lifeline[:INCARNATION_NBYTES] != self._peer.incarnation:
            raise PeerLost(self._peer.agent_id, "its process is gone")
        open_ids = np.frombuffer(lifeline, np.uint32, offset=INCARNATION_NBYTES).tolist()
        for region_id, open_id in zip(region_ids, open_ids, strict=True):
            if region_id != open_id:
                raise RegionError(region_id, "was closed by its owner during the read")
        if failure is not None and failure.errno == errno.ESRCH:
            raise PeerLost(self._peer.agent_id, "its process is gone") from failure
        if failure is not None:
            raise PathFailed(self.name, str(failure)) from failure

    def forget(self, region_id: int) -> None:
        """The peer closed the region."""
        self._memory.forget(region_id)
        self._unreachable.discard(region_id)

    def progress(self, attempt: Attempt) -> dict[object, int]:
        return {}

    def drop(self, carriers: object) -> bool:
        return False

    async def close(self) -> None:
        if self._streams is not None:
            await self._streams.close()
        self._memory.close()
