"""The path between two processes of one host."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence

from moonpool.transfer.connections.handshake import Identity
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.batch_request import Direction
from moonpool.transfer.copying.job import CopyJob
from moonpool.transfer.copying.mapped_region import MappedRegion
from moonpool.transfer.copying.peer_memory import PeerMemory, check_lifeline
from moonpool.transfer.copying.pool import CopyPool, copy_chunking
from moonpool.transfer.errors import PathFailed, PeerLost
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.span import Spans, region_ids
from moonpool.transfer.native.compiled_copy import compiled_copy
from moonpool.transfer.paths.base import NOT_WRITTEN, Path, WrittenNow, known_regions
from moonpool.transfer.paths.tcp.stream_path import StreamPath


class ShmPath(Path):
    """Copies from the peer's memory.

    A read needs only that the peer's process lives: it may be busy, or stopped. A write asks the peer to copy
    from us, so that the peer decides, at that moment, whether its memory may be written.
    """

    name = "shm"

    def __init__(
        self,
        pool: CopyPool,
        peer: Identity,
        memory: PeerMemory,
        region: Callable[[int], RegionInfo | None],
        streams: StreamPath | None,
    ) -> None:
        """streams: for writes, and for memory that cannot be read directly. None: not needed."""
        self._pool = pool
        self._peer = peer
        self._memory = memory
        self._region = region
        self._streams = streams
        self._unreachable: set[int] = set()
        self._mapped: dict[int, MappedRegion] = {}

    def chunking(
        self, direction: Direction, nbytes: int, verified: bool, region_ids: Sequence[int]
    ) -> Chunking:
        streams = self._streams_for(direction, region_ids)
        if streams is not None:
            return streams.chunking(direction, nbytes, verified, region_ids)
        return copy_chunking(nbytes, verified)

    async def open(self, direction: Direction, region_ids: Sequence[int]) -> None:
        if direction == "read":
            for region_id in region_ids:
                info = self._region(region_id)
                if info is not None and not await self._memory.reach(info):
                    self._unreachable.add(region_id)
        streams = self._streams_for(direction, region_ids)
        if streams is not None:
            await streams.open(direction, region_ids)

    def start(self, attempt: Attempt) -> None:
        rows = attempt.plan.rows
        ids = region_ids(rows.remote_spans)
        streams = self._streams_for(attempt.request.direction, ids)
        if streams is not None:
            streams.start(attempt)
            return
        infos = known_regions(ids, self._region, attempt)
        if infos is None:
            return
        source = self._memory.locate(infos, attempt.hold)
        attempt.on_finished(source.keep.clear)
        CopyJob(
            attempt,
            rows.address,
            rows.based(source.bases),
            source.copy,
            conclude=functools.partial(self._conclude, ids),
            waits=attempt.hold.device is not None or any(info.on_device for info in infos),
        ).start(self._pool)

    def read_now(self, region: Region, local: Spans, remote: Spans, checksums: bytes) -> int:
        region_id = remote.region.item(0)
        mapped = self._mapped.get(region_id) or self._find_mapped(region_id)
        return 0 if mapped is None else mapped.read(region, local, remote, checksums)

    def write_now(
        self, region: Region, local: Spans, remote: Spans, checksums: bytes | None, grant: int
    ) -> WrittenNow:
        info = self._region(remote.region.item(0))
        if self._streams is None or info is None or info.on_device:
            return NOT_WRITTEN
        return self._streams.write_now(region, local, remote, checksums, grant)

    def _streams_for(self, direction: Direction, region_ids: Sequence[int]) -> StreamPath | None:
        """The streams, if they move batches of these regions of the peer. None: they are copied."""
        needed = direction == "write" or not self._unreachable.isdisjoint(region_ids)
        return self._streams if needed else None

    def _find_mapped(self, region_id: int) -> MappedRegion | None:
        """The region, if an earlier batch has mapped it."""
        compiled, info = compiled_copy(), self._region(region_id)
        array = self._memory.mapping(region_id)
        if compiled is None or info is None or array is None or (witness := self._memory.witness()) is None:
            return None
        mapped = MappedRegion(compiled, region_id, array, info.nbytes, self._peer, witness)
        self._mapped[region_id] = mapped
        return mapped

    def _conclude(self, region_ids: list[int], failure: OSError | None) -> None:
        """Check that the regions were open, at the same process, until after the copy."""
        try:
            lifeline = self._memory.lifeline(region_ids)
        except OSError as error:
            raise PeerLost(self._peer.agent_id, f"its memory is gone ({error})") from error
        check_lifeline(lifeline, self._peer, region_ids)
        if failure is not None and failure.errno == errno.ESRCH:
            raise PeerLost(self._peer.agent_id, "its process is gone") from failure
        if failure is not None:
            raise PathFailed(self.name, str(failure)) from failure

    def forget(self, region_id: int) -> None:
        """The peer closed the region."""
        self._mapped.pop(region_id, None)
        self._memory.forget(region_id)
        self._unreachable.discard(region_id)

    async def close(self) -> None:
        if self._streams is not None:
            await self._streams.close()
        self._mapped.clear()
        self._memory.close()
