"""A connected agent: the other end of reads and writes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from moonpool.transfer import metrics
from moonpool.transfer.connections.link import Link
from moonpool.transfer.connections.wire import MAX_FRAME_NBYTES
from moonpool.transfer.copying.batch_request import BatchRequest, Direction
from moonpool.transfer.copying.joint_read import JointRead
from moonpool.transfer.copying.pool import INLINE_ROWS
from moonpool.transfer.errors import RegionError, SpanError, TransferError
from moonpool.transfer.memory.region import RegionTable
from moonpool.transfer.memory.span import Span, Spans, check_disjoint, check_pairs, region_ids
from moonpool.transfer.memory.write_grants import STANDING
from moonpool.transfer.native.arrays import U64
from moonpool.transfer.paths.base import Path
from moonpool.transfer.peers.batch import Batch, LoopTurn
from moonpool.transfer.peers.failover import PeerRoute
from moonpool.transfer.peers.inline import InlineBatches
from moonpool.transfer.peers.path_choice import PathChoice


class Peer:
    """One incarnation of an agent. It cannot be used after its process has ended: connect again.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        agent_id: str,
        epoch: int,
        link: Link,
        paths: Sequence[Path],
        regions: RegionTable,
        *,
        verify: bool,
        turn: LoopTurn,
        owns_link: bool = True,
    ) -> None:
        """turn: of the agent. owns_link: close the link with this object; False if the other side made the
        connection."""
        self.agent_id = agent_id
        self.epoch = epoch
        self.link = link
        self.route = PeerRoute(agent_id, link, PathChoice(paths), regions)
        self.owns_link = owns_link
        self._verify = verify
        self._inline = InlineBatches(self.route, turn, verify=verify)
        self._batches: set[Batch] = set()
        self._releasing: set[asyncio.Task[None]] = set()
        self._lost: TransferError | None = None
        self.on_lost: Callable[[Peer], None] | None = None
        link.on_region_closed(self._region_closed)

    @property
    def lost(self) -> bool:
        """True once its process was seen to be gone, or the agent was closed."""
        return self._lost is not None

    @property
    def paths(self) -> PathChoice:
        return self.route.paths

    @property
    def bandwidth(self) -> dict[str, float]:
        """Bytes/s by path: a moving average over batches of 1 MiB and more."""
        return self.paths.bandwidth

    @property
    def nbytes_per_s(self) -> float:
        """The bandwidth of the first measured path in the current order; 0: no path was measured."""
        bandwidth = self.bandwidth
        return next((bandwidth[path.name] for path in self.paths.ranked() if path.name in bandwidth), 0.0)

    def read(
        self,
        local: Sequence[Span] | Spans,
        remote: Sequence[Span] | Spans,
        *,
        deadline_s: float,
        checksums: Sequence[int] | None = None,
        joint: JointRead | None = None,
    ) -> Batch:
        """Copy ``remote[i]``, in the peer's regions, to ``local[i]``, in ours, of equal sizes.

        checksums: the owner's ``transfer.checksum`` of each span; verified unless ``transfer.checksum`` is
        off. joint: of reads from several peers that fill the same blocks.

        Raises SpanError, which names the span, before anything is posted. The awaited batch raises
            SpanError, RegionError: the peer has no such bytes; nothing was read.
            ChecksumMismatch, PeerLost, StaleEpoch, DeadlineExceeded, RegionError: the bytes of the local
            spans are undefined, and nothing touches them any more.
        """
        if joint is None and self._lost is None and 0 < deadline_s < math.inf and len(local) <= INLINE_ROWS:
            local = local if isinstance(local, Spans) else Spans.of(local)
            remote = remote if isinstance(remote, Spans) else Spans.of(remote)
            done = self._inline.read(local, remote, deadline_s, checksums)
            if done is not None:
                return done
        return self._post("read", local, remote, deadline_s, checksums, joint=joint)

    def write(
        self,
        local: Sequence[Span] | Spans,
        remote: Sequence[Span] | Spans,
        *,
        deadline_s: float,
        checksums: Sequence[int] | None = None,
        notify: bytes | None = None,
        grant: int = STANDING,
    ) -> Batch:
        """Copy ``local[i]`` to ``remote[i]``; otherwise as ``read``, with the same errors, and GrantLapsed.

        grant: id of the peer's ``WriteGrant`` of these bytes; by default the regions that it has opened to
        all (``TransferAgent.allow_writes``).

        checksums: of each span; the peer's copy is verified against them. Without them, writes over a network
        are verified against the local bytes. notify: a note sent to the peer after all bytes have arrived.
        After an error the remote spans are undefined. The peer may go on writing what is on its way until it
        revokes the grant (``WriteGrant.revoke``).
        """
        unfinished: list[int] = []
        if notify is None and self._lost is None and 0 < deadline_s < math.inf and len(local) <= INLINE_ROWS:
            local = local if isinstance(local, Spans) else Spans.of(local)
            remote = remote if isinstance(remote, Spans) else Spans.of(remote)
            done = self._inline.write(local, remote, deadline_s, checksums, grant, unfinished)
            if done is not None:
                return done
        return self._post(
            *("write", local, remote, deadline_s, checksums),
            notify=notify,
            grant=grant,
            unfinished_streams=unfinished,
        )

    def notify(self, payload: bytes) -> None:
        """Send the peer a note of at most 64 KiB. Its ``notifications()`` returns notes in order.

        Raises TransferError when the connection is broken, or the peer has left too many notes unread.
        """
        if self._lost is not None:
            raise self._lost
        _check_note(payload)
        self.link.note(payload)
        metrics.NOTES.labels("sent").inc()

    def _post(
        self,
        direction: Direction,
        local: Sequence[Span] | Spans,
        remote: Sequence[Span] | Spans,
        deadline_s: float,
        checksums: Sequence[int] | None,
        *,
        notify: bytes | None = None,
        grant: int = STANDING,
        joint: JointRead | None = None,
        unfinished_streams: Sequence[int] = (),
    ) -> Batch:
        if self._lost is not None:
            raise self._lost
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"deadline_s must be positive and finite, got {deadline_s}")
        here, there = Spans.of(local), Spans.of(remote)
        check_pairs(here, there)
        expected = None if checksums is None else _check_checksums(checksums, len(here))
        if notify is not None:
            _check_note(notify)
        addresses = self.route.regions.addresses(here, writable=direction == "read")
        check_disjoint(here if direction == "read" else there)
        request = BatchRequest(
            direction=direction,
            local=here,
            addresses=addresses,
            remote=there,
            deadline_s=deadline_s,
            ends_at=time.monotonic() + deadline_s,
            checksums=expected if self._verify else None,
            verify_on_network=self._verify,
            notify=notify,
            grant=grant,
            joint=joint,
            nbytes=here.total_nbytes,
            local_regions=region_ids(here),
            remote_regions=region_ids(there),
        )
        batch = Batch(self, self.route, request, unfinished_streams)
        self._batches.add(batch)
        return batch

    def batch_ended(self, batch: Batch) -> None:
        self._batches.discard(batch)

    def lose(self, error: TransferError) -> None:
        """End all batches with ``error``, refuse new ones, and call ``on_lost``. Idempotent."""
        if self._lost is None:
            self.end(error)
            if self.on_lost is not None:
                self.on_lost(self)

    def end(self, error: TransferError) -> None:
        """End all batches with ``error``, and refuse new ones. The connection stays open."""
        self._lost = error
        for batch in list(self._batches):
            batch.fail(error)

    def _region_closed(self, region_id: int) -> None:
        reading = [batch for batch in self._batches if batch.uses(region_id)]
        for batch in reading:
            batch.fail(RegionError(region_id, "was closed by its owner"))
        releasing = asyncio.get_running_loop().create_task(self._release_region(region_id, reading))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)

    async def _release_region(self, region_id: int, reading: list[Batch]) -> None:
        for batch in reading:
            await batch.ended()
        # If the connection has broken meanwhile, the owner sees that.
        with contextlib.suppress(TransferError):
            self.link.release_region(region_id)

    async def close(self) -> None:
        """Close the link and the paths of a lost peer."""
        for batch in list(self._batches):
            await batch.ended()
        if self._releasing:
            await asyncio.wait(list(self._releasing))
        if self.owns_link:
            self.link.close()
        for path in self.paths:
            await path.close()


def _check_note(payload: bytes) -> None:
    if not isinstance(payload, bytes):
        raise TypeError(f"a note is bytes, not {type(payload).__name__}")
    if len(payload) > MAX_FRAME_NBYTES:
        raise ValueError(f"a note has at most {MAX_FRAME_NBYTES} bytes, not {len(payload)}")


def _check_checksums(checksums: Sequence[int], num_spans: int) -> U64:
    if len(checksums) != num_spans:
        raise SpanError(min(len(checksums), num_spans), f"{num_spans} spans, but {len(checksums)} checksums")
    try:
        return np.frombuffer(array("Q", checksums), np.uint64)
    except (TypeError, OverflowError):
        for index, value in enumerate(checksums):
            if not hasattr(value, "__index__") or not 0 <= value < 1 << 64:
                raise SpanError(index, f"a checksum is an integer of 64 bits, not {value!r}") from None
        raise
