"""A batch that is moved by copying memory, and the threads that share the work."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Protocol

from transfer.attempt import Attempt
from transfer.copy_pool import CopyPool
from transfer.memory_copy import SLICE_NBYTES
from transfer.span import U64, Index

# Below this the hop to a thread and back costs more than the copy; the event loop's thread does it, in 0.1
# ms.
_INLINE_NBYTES = 1 << 20
_INLINE_ROWS = 256
# Small enough that what has been copied is still in the cache when it is verified.
_OBSERVED_CHUNK_NBYTES = 2 << 20
_MAX_CHUNK_NBYTES = 32 << 20
_MAX_CHUNK_ROWS = 16 * 1024
_OBSERVED_CHUNK_ROWS = 1024
# Below this a second thread has started when the first is done.
_MIN_SHARED_NBYTES = 8 << 20


def copy_chunking(nbytes: int, observed: bool) -> tuple[int, int]:
    """``Path.chunking`` of a batch that is copied: large chunks, or small ones for those who follow it."""
    if observed:
        return _OBSERVED_CHUNK_NBYTES, _OBSERVED_CHUNK_ROWS
    return min(max(nbytes // 8, SLICE_NBYTES), _MAX_CHUNK_NBYTES), _MAX_CHUNK_ROWS


class Copy(Protocol):
    """``memory_copy.copy_from`` for some process, ``copy_here``, or what moves device memory."""

    def __call__(self, to: U64, source: U64, nbytes: U64, wanted: Callable[[], bool]) -> bool: ...


class CopyJob:
    """One attempt's copies. Threads take chunk after chunk until none is left."""

    def __init__(
        self,
        attempt: Attempt,
        to: U64,
        source: U64,
        copy: Copy,
        *,
        verify: Callable[[Index], None],
        conclude: Callable[[OSError | None], None],
        waits: bool = False,
    ) -> None:
        """to, source: addresses of the attempt's rows. verify: called with spans that are complete.

        waits: a copy sleeps until a device is done, so no event loop can wait, and no processor is busy.

        conclude: called by each thread after its last copy, with what the kernel said if that failed; raises
        the TransferError that ends the attempt.
        """
        self._attempt = attempt
        self._to = to
        self._source = source
        self._copy = copy
        self._verify = verify
        self._conclude = conclude
        self._waits = waits
        self._chunks = itertools.count()

    def start(self, pool: CopyPool) -> None:
        """Run it: small ones here and now, others on the pool's threads."""
        plan = self._attempt.plan
        if self._waits:
            pool.submit(self._run)
            return
        if plan.nbytes <= _INLINE_NBYTES and len(plan.rows) <= _INLINE_ROWS:
            self._run()
            return
        lanes = 1
        if plan.nbytes >= _MIN_SHARED_NBYTES:
            lanes = min(pool.lanes.choose(), len(plan.chunks))
            started = time.perf_counter()
            self._attempt.afterwards(
                lambda: pool.lanes.record(lanes, plan.nbytes / (time.perf_counter() - started))
            )
        for _ in range(lanes):
            pool.submit(self._run)

    def _run(self) -> None:
        # What is on the list of those inside, so that two threads are told apart. Nothing needs to be
        # kicked: the copy looks at ``stopped`` between slices.
        def kick() -> None: ...

        if not self._attempt.enter(kick):
            return
        done = 0
        error: Exception | None = None
        try:
            try:
                done = self._take_chunks()
            except OSError as failure:
                self._conclude(failure)
            else:
                self._conclude(None)
        except Exception as failure:
            # Whatever it is, it is the batch's: who awaits it must hear, and nobody else would.
            error, done = failure, 0
        self._attempt.leave(kick, chunks=done, error=error)

    def _take_chunks(self) -> int:
        attempt, plan = self._attempt, self._attempt.plan
        done = 0
        while (chunk := next(self._chunks)) < len(plan.chunks):
            rows = slice(*plan.chunks[chunk])
            sizes = plan.rows.nbytes[rows]
            if not self._copy(self._to[rows], self._source[rows], sizes, lambda: not attempt.stopped):
                break
            spans = attempt.arrived(chunk)
            self._verify(spans)
            attempt.announce(spans)
            done += 1
        return done
