"""One attempt to move a batch over one path, and the rule that makes stopping it safe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from moonpool.transfer.errors import ChecksumMismatch
from moonpool.transfer.memory.chunks import Plan, Rows
from moonpool.transfer.memory.region import Hold
from moonpool.transfer.memory.span import Spans
from moonpool.transfer.native.arrays import U64, Index
from moonpool.transfer.native.compiled_copy import Stop

if TYPE_CHECKING:
    from moonpool.transfer.copying.joint_read import JointRead

Direction = Literal["read", "write"]

_NONE: Index = np.empty(0, np.intp)


class Attempt:
    """What the threads of a path work on.

    A thread calls ``enter`` before it touches the spans' bytes and ``leave`` when it no longer does.
    ``stop`` keeps new ones out and kicks those inside. ``on_end`` is called once, from whichever thread was
    last, when all chunks are done or when it was stopped and nobody is inside: from then on the spans are
    the caller's again.
    """

    def __init__(
        self,
        direction: Direction,
        local: Spans,
        remote: Spans,
        hold: Hold,
        plan: Plan,
        *,
        deadline_s: Callable[[], float],
        promised: U64 | None,
        verify_remote: bool,
        left_behind: list[int],
        on_spans: Callable[[Index], None] | None,
        on_end: Callable[[Exception | None], None],
        joint: JointRead | None = None,
    ) -> None:
        self.direction = direction
        self.local = local
        self.remote = remote
        self.plan = plan
        self.deadline_s = deadline_s
        """Seconds left, at the time of the call."""
        self.promised = promised
        self.verify_remote = verify_remote
        """Of a write: ask the peer for the checksums of what it now has."""
        self.left_behind = left_behind
        """Of a write: numbers of connections, of this attempt or earlier ones of the batch, on which the peer
        may still be taking bytes of it. It must have ended them before the write is done."""
        self.hold = hold
        """The regions here."""
        self.joint = joint
        """Of a read whose spans are filled together with those of others."""
        self._on_spans = on_spans
        self._on_end = on_end
        self._lock = threading.Lock()
        self._inside: list[Callable[[], None]] = []
        self.chunks_left = len(plan.chunks)
        self._ended = False
        self._afterwards: list[Callable[[], None]] = []
        self.stop_byte: Stop = np.zeros(1, np.uint8)
        self.error: Exception | None = None

    @property
    def stopped(self) -> bool:
        return bool(self.stop_byte[0])

    def enter(self, kick: Callable[[], None]) -> bool:
        """False: it is over, keep out. ``kick`` must make this thread leave soon; it is called at most
        once.
        """
        with self._lock:
            if self.stopped or self._ended:
                return False
            self._inside.append(kick)
            return True

    def leave(self, kick: Callable[[], None], chunks: int = 0, error: Exception | None = None) -> None:
        """The thread that entered with ``kick`` is out; ``chunks`` more are done, or ``error`` ended its
        work.
        """
        with self._lock:
            self._inside.remove(kick)
            self.chunks_left -= chunks
            if error is not None:
                self._stop(error)
            ended = self._end_if_empty()
        if ended:
            self._finish()

    def expect(self, chunks: int) -> None:
        """There is more to do than the plan says. Before ``start``, or from inside."""
        with self._lock:
            self.chunks_left += chunks

    def stop(self, error: Exception) -> None:
        """End it with ``error``, from any thread. The first reason given counts."""
        with self._lock:
            self._stop(error)
            ended = self._end_if_empty()
        if ended:
            self._finish()

    def _stop(self, error: Exception) -> None:
        if self.stopped or self.chunks_left == 0:
            return
        self.stop_byte[0], self.error = 1, error
        # Under the lock, so that a thread cannot leave and be kicked out of somebody else's work.
        for kick in self._inside:
            kick()

    def _end_if_empty(self) -> bool:
        over = not self._inside and (self.stopped or self.chunks_left == 0)
        ended, self._ended = over and not self._ended, self._ended or over
        return ended

    def _finish(self) -> None:
        for callback in self._afterwards:
            callback()
        self.hold.release()
        self._on_end(self.error)

    def afterwards(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when nobody is inside any more and it has ended. Before the first ``enter``
        only.
        """
        self._afterwards.append(callback)

    def rows(self, chunk: int) -> Rows:
        begin, end = self.plan.chunks[chunk]
        return self.plan.rows[begin:end]

    def local_spans(self, rows: Rows) -> Spans:
        """Which bytes of our regions ``rows`` are."""
        region, offset = np.zeros(len(rows), np.uint32), rows.address.copy()
        for held in self.hold.regions:
            first, end = np.uint64(held.address), np.uint64(held.address + held.nbytes)
            inside = (region == 0) & (rows.address >= first) & (rows.address + rows.nbytes <= end)
            region[inside] = held.id
            offset[inside] -= first
        return Spans(region, offset, rows.nbytes)

    def span_at(self, chunk: int, row: int) -> int:
        """The first span in row ``row`` of a chunk."""
        return self.plan.span_at(self.plan.chunks[chunk][0] + row)

    @property
    def followed(self) -> bool:
        """Somebody wants to hear of spans as they become complete."""
        return self._on_spans is not None

    def arrived(self, chunk: int) -> Index:
        """A chunk's bytes are where they should be. Returns the spans this completed, if anybody asks. Call
        inside.
        """
        if not self.followed and self.promised is None and not self.verify_remote:
            return _NONE
        return self.plan.done(chunk)

    def verify_arrival(self, spans: Index) -> None:
        """Compare what a read brought with what was promised. Call inside. Raises ChecksumMismatch."""
        if self.promised is not None and len(spans):
            self.verify(spans, self._local_checksums(spans))

    def verify_delivery(self, spans: Index, found: U64) -> None:
        """Compare the checksums ``found`` at the peer after a write with those promised, or else with ours.
        Call inside. Raises ChecksumMismatch.
        """
        if self.promised is not None:
            self.verify(spans, found)
        else:
            compare(spans, self._local_checksums(spans), found)

    def verify(self, spans: Index, found: U64) -> None:
        """Compare what arrived with what was promised. Raises ChecksumMismatch."""
        assert self.promised is not None
        compare(spans, self.promised[spans], found)

    def announce(self, spans: Index) -> None:
        """Tell whoever follows the batch span by span."""
        if self._on_spans is not None and len(spans):
            self._on_spans(spans)

    def _local_checksums(self, spans: Index) -> U64:
        return self.hold.checksums(self.local.take(spans))


def compare(spans: Index, promised: U64, found: U64) -> None:
    """``promised[k]`` and ``found[k]`` are checksums of span ``spans[k]``. Raises ChecksumMismatch."""
    differ = promised != found
    if differ.any():
        at = int(differ.argmax())
        raise ChecksumMismatch(int(spans[at]), int(promised[at]), int(found[at]))
