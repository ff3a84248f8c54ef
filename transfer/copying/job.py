"""A batch that is moved by copying memory, and the threads that share the work."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.memcpy import SLICE_NBYTES, Copy
from moonpool.transfer.copying.pool import CopyPool
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.native.arrays import U64
from moonpool.transfer.native.compiled_copy import mover

# Below this the hop to a thread and back costs more than the copy; the event loop's thread does it, in 0.1
# ms.
_INLINE_NBYTES = 1 << 20
_INLINE_ROWS = 256
# Small enough that what has been copied is still in the cache when it is verified, where that is a second
# pass.
_OBSERVED_CHUNK_NBYTES = 2 << 20
_MAX_CHUNK_NBYTES = 32 << 20
_MAX_CHUNK_ROWS = 16 * 1024
_OBSERVED_CHUNK_ROWS = 1024


def is_small(nbytes: int, num_rows: int) -> bool:
    """Whether the event loop's thread copies it."""
    return nbytes <= _INLINE_NBYTES and num_rows <= _INLINE_ROWS


def copy_chunking(nbytes: int, observed: bool) -> Chunking:
    """``Path.chunking`` of a batch that is copied."""
    if observed and mover() is None:
        return Chunking(_OBSERVED_CHUNK_NBYTES, _OBSERVED_CHUNK_ROWS, whole_spans=True)
    chunk_nbytes = min(max(nbytes // 4, SLICE_NBYTES), _MAX_CHUNK_NBYTES)
    return Chunking(chunk_nbytes, _MAX_CHUNK_ROWS, whole_spans=observed)


class CopyJob:
    """One attempt's copies. Threads take chunk after chunk until none is left."""

    def __init__(
        self,
        attempt: Attempt,
        to: U64,
        source: U64,
        copy: Copy,
        *,
        conclude: Callable[[OSError | None], None],
        waits: bool = False,
    ) -> None:
        """to, source: addresses of the attempt's rows.

        waits: a copy sleeps until a device is done, so no event loop can wait, and no processor is busy.

        conclude: called by each thread after its last copy, with what the kernel said if that failed; raises
        the TransferError that ends the attempt.
        """
        self.attempt = attempt
        self.to = to
        self.source = source
        self.copy = copy
        self.conclude = conclude
        self._waits = waits
        self._chunks = itertools.count()

    def start(self, pool: CopyPool) -> None:
        """Run it: small ones here and now, others on the pool's threads; one of a joint read with the others
        of that."""
        joint = self.attempt.joint
        if joint is None or not joint.join(self, pool):
            self.start_alone(pool)

    def start_alone(self, pool: CopyPool) -> None:
        """``start``, joint or not."""
        plan = self.attempt.plan
        if self._waits:
            pool.submit(self._run)
            return
        if is_small(plan.nbytes, len(plan.rows)):
            self._run()
            return
        lanes, ended = pool.choose(plan.nbytes, len(plan.chunks))
        self.attempt.afterwards(ended)
        for _ in range(lanes):
            pool.submit(self._run)

    def _run(self) -> None:
        # What is on the list of those inside, so that two threads are told apart. Nothing needs to be
        # kicked: the copy looks at ``stopped`` between slices.
        def kick() -> None: ...

        if not self.attempt.enter(kick):
            return
        done = 0
        error: Exception | None = None
        try:
            try:
                done = self._take_chunks()
            except OSError as failure:
                self.conclude(failure)
            else:
                self.conclude(None)
        except Exception as failure:
            # Whatever it is, it is the batch's: who awaits it must hear, and nobody else would.
            error, done = failure, 0
        self.attempt.leave(kick, chunks=done, error=error)

    def _take_chunks(self) -> int:
        attempt, plan = self.attempt, self.attempt.plan
        done = 0
        while (chunk := next(self._chunks)) < len(plan.chunks):
            begin, end = plan.chunks[chunk]
            rows = slice(begin, end)
            # One that is verified is planned in whole spans.
            digests = None if attempt.promised is None else np.empty(end - begin, np.uint64)
            if not self.copy(
                self.to[rows], self.source[rows], plan.rows.nbytes[rows], attempt.stop_byte, digests
            ):
                break
            if digests is not None:
                attempt.verify(np.arange(begin, end), digests)
            if attempt.followed:
                attempt.announce(attempt.arrived(chunk))
            done += 1
        return done
