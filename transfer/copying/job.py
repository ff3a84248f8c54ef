"""One attempt's copies, by the processor or a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.memcpy import Copy
from moonpool.transfer.copying.pool import CopyPool, is_small
from moonpool.transfer.native.arrays import U64


class CopyJob:
    """Threads take chunk after chunk of the attempt until none is left."""

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

        conclude: called by each thread after its last copy, with the copy's error if it failed; raises the
        TransferError that ends the attempt. waits: a copy sleeps until a device is done, so it never runs on
        the event loop's thread, and one thread is enough.
        """
        self.to = to
        self.source = source
        self.copy = copy
        self.conclude = conclude
        self.nbytes = attempt.plan.rows.nbytes
        self.num_chunks = len(attempt.plan.chunks)
        self.enter: Callable[[Callable[[], None]], bool] = attempt.enter
        self.leave = attempt.leave
        self._attempt = attempt
        self._waits = waits
        self._chunks = itertools.count()

    def start(self, pool: CopyPool) -> None:
        """Copy: small jobs now, others on threads; a job of a joint read together with the others of it."""
        joint = self._attempt.request.joint
        if joint is None or not joint.join(self, pool):
            self.start_alone(pool)

    def start_alone(self, pool: CopyPool) -> None:
        """``start``, without the joint read."""
        plan = self._attempt.plan
        if self._waits:
            pool.submit(self._run)
            return
        if is_small(plan.nbytes, len(plan.rows)):
            self._run()
            return
        num_threads, ended = pool.choose(plan.nbytes, len(plan.chunks))
        self._attempt.on_finished(ended)
        for _ in range(num_threads):
            pool.submit(self._run)

    def _run(self) -> None:
        # Identifies this thread to the attempt. The copy itself looks at ``stop_byte`` between slices.
        def interrupt() -> None: ...

        if not self._attempt.enter(interrupt):
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
            # Any error ends the batch: otherwise its waiter would never be told.
            error, done = failure, 0
        self._attempt.leave(interrupt, chunks=done, error=error)

    def _take_chunks(self) -> int:
        attempt, plan = self._attempt, self._attempt.plan
        done = 0
        while (chunk := next(self._chunks)) < len(plan.chunks):
            begin, end = plan.chunks[chunk]
            rows = slice(begin, end)
            # The plan of a verified batch has whole spans.
            digests = None if attempt.request.checksums is None else np.empty(end - begin, np.uint64)
            if not self.copy(
                self.to[rows], self.source[rows], plan.rows.nbytes[rows], attempt.stop_byte, digests
            ):
                break
            if digests is not None:
                attempt.verify(np.arange(begin, end), digests)
            done += 1
        return done
