"""One attempt to move a batch over one path, and the rule that makes stopping it safe."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from moonpool.transfer.copying.batch_request import BatchRequest
from moonpool.transfer.memory.checksum import compare
from moonpool.transfer.memory.chunks import ChunkPlan, Rows
from moonpool.transfer.memory.region import Hold
from moonpool.transfer.memory.span import Spans
from moonpool.transfer.native.arrays import U64, Index
from moonpool.transfer.native.compiled_copy import Stop

_NONE: Index = np.empty(0, np.intp)


class Attempt:
    """The work of a path's threads.

    A thread calls ``enter`` before it touches the spans' bytes, and ``leave`` afterwards. ``stop`` refuses
    new threads and interrupts those inside. ``on_end`` is called once, by the last thread, when all chunks
    are done or the attempt was stopped: from then on the spans are the caller's again.
    """

    def __init__(
        self,
        request: BatchRequest,
        hold: Hold,
        plan: ChunkPlan,
        *,
        verify_remote: bool,
        unfinished_streams: list[int],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """hold: of the local regions.

        verify_remote: of a write: ask the peer for the checksums of its copy.
        unfinished_streams: of a write: numbers of connections, of this attempt or earlier ones of the batch,
        from which the peer may still take bytes. It must end them before the write is done.
        """
        self.request = request
        self.hold = hold
        self.plan = plan
        self.verify_remote = verify_remote
        self.unfinished_streams = unfinished_streams
        self.chunks_left = len(plan.chunks)
        self.num_arrived = 0  # chunks; threads that add at the same time may lose one
        self.stop_byte: Stop = np.zeros(1, np.uint8)
        self.error: Exception | None = None
        self._on_end = on_end
        self._lock = threading.Lock()
        self._inside: list[Callable[[], None]] = []
        self._ended = False
        self._on_finished: list[Callable[[], None]] = []

    @property
    def stopped(self) -> bool:
        return bool(self.stop_byte[0])

    def enter(self, interrupt: Callable[[], None]) -> bool:
        """False: the attempt is over. ``interrupt``, called at most once, makes this thread leave soon."""
        with self._lock:
            if self.stopped or self._ended:
                return False
            self._inside.append(interrupt)
            return True

    def leave(self, interrupt: Callable[[], None], chunks: int = 0, error: Exception | None = None) -> None:
        """The thread that entered with ``interrupt`` leaves. It did ``chunks``, or failed with ``error``."""
        with self._lock:
            self._inside.remove(interrupt)
            self.chunks_left -= chunks
            if error is not None:
                self._stop(error)
            ended = self._end_if_empty()
        if ended:
            self._finish()

    def expect(self, chunks: int) -> None:
        """Add chunks to those of the plan. Call before ``start``, or while inside."""
        with self._lock:
            self.chunks_left += chunks

    def stop(self, error: Exception) -> None:
        """End the attempt with ``error``, from any thread. Only the first error counts."""
        with self._lock:
            self._stop(error)
            ended = self._end_if_empty()
        if ended:
            self._finish()

    def _stop(self, error: Exception) -> None:
        if self.stopped or self.chunks_left == 0:
            return
        self.stop_byte[0], self.error = 1, error
        # Under the lock: a thread that has left, and works on another attempt, must not be interrupted.
        for interrupt in self._inside:
            interrupt()

    def _end_if_empty(self) -> bool:
        over = not self._inside and (self.stopped or self.chunks_left == 0)
        ended, self._ended = over and not self._ended, self._ended or over
        return ended

    def _finish(self) -> None:
        for callback in self._on_finished:
            callback()
        self.hold.release()
        self._on_end(self.error)

    def on_finished(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the attempt has ended. Only before the first ``enter``."""
        self._on_finished.append(callback)

    def rows(self, chunk: int) -> Rows:
        begin, end = self.plan.chunks[chunk]
        return self.plan.rows[begin:end]

    def local_spans(self, rows: Rows) -> Spans:
        """The local regions and offsets of ``rows``."""
        region_id, offset = np.zeros(len(rows), np.uint32), rows.address.copy()
        for region in self.hold.regions:
            first, end = np.uint64(region.address), np.uint64(region.address + region.nbytes)
            inside = (region_id == 0) & (rows.address >= first) & (rows.address + rows.nbytes <= end)
            region_id[inside] = region.id
            offset[inside] -= first
        return Spans(region_id, offset, rows.nbytes)

    def span_at(self, chunk: int, row: int) -> int:
        """The first span in row ``row`` of a chunk."""
        return self.plan.span_at(self.plan.chunks[chunk][0] + row)

    def arrived(self, chunk: int) -> Index:
        """Note that a chunk was moved. Returns the spans to verify that this completed. Call inside."""
        self.num_arrived += 1
        if self.request.checksums is None and not self.verify_remote:
            return _NONE
        return self.plan.done(chunk)

    def verify_arrival(self, spans: Index) -> None:
        """Verify spans of a read. Call inside. Raises ChecksumMismatch."""
        if self.request.checksums is not None and len(spans):
            self.verify(spans, self._local_checksums(spans))

    def verify_delivery(self, spans: Index, found: U64) -> None:
        """Verify the checksums ``found`` at the peer, against those given or the local bytes. Call inside.

        Raises ChecksumMismatch.
        """
        if self.request.checksums is not None:
            self.verify(spans, found)
        else:
            compare(spans, self._local_checksums(spans), found)

    def verify(self, spans: Index, found: U64) -> None:
        """Compare ``found`` with the checksums of the request. Raises ChecksumMismatch."""
        assert self.request.checksums is not None
        compare(spans, self.request.checksums[spans], found)

    def _local_checksums(self, spans: Index) -> U64:
        return self.hold.checksums(self.request.local.take(spans))
