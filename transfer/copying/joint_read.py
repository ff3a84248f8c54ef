"""Reads from several peers that fill the same blocks between them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np

from moonpool.transfer.copying.attempt import compare
from moonpool.transfer.copying.job import CopyJob, copy_chunking, is_small
from moonpool.transfer.copying.memcpy import copy_here
from moonpool.transfer.copying.pool import CopyPool
from moonpool.transfer.copying.runs import move_runs
from moonpool.transfer.errors import PathFailed
from moonpool.transfer.memory.chunks import windows
from moonpool.transfer.memory.region import Region
from moonpool.transfer.native.arrays import U64
from moonpool.transfer.native.compiled_copy import Stop, mover


class JointRead:
    """Blocks of ours that ``num_batches`` reads fill, which is given to each of these (``Peer.read``).

    The batches stay what they are, each with its peer's life, its deadline and its errors. Where all of them
    come to be copied from memory that is mapped here, one copy goes through the blocks in the order of their
    bytes, and compares their checksums on its way: ``verified``, once the batches have ended. Else each batch
    goes its own way, and to verify the blocks is the caller's.

    A mismatch ends one of the batches with ChecksumMismatch, which numbers the blocks. When a batch is
    stopped on the way, the others begin again without it.
    """

    def __init__(
        self, region: Region, offsets: Sequence[int], nbytes: int, checksums: Sequence[int], num_batches: int
    ) -> None:
        """offsets: of blocks of ``nbytes`` in our ``region``; checksums: ``transfer.checksum`` of each."""
        self.verified = False
        self._begins = np.array(offsets, np.uint64) + np.uint64(region.address)
        self._block_nbytes = nbytes
        self._promised = np.array(checksums, np.uint64)
        self._num_batches = num_batches
        self._jobs: list[CopyJob] = []
        self._pool: CopyPool | None = None
        self._over = False  # for those who would join

    def join(self, job: CopyJob, pool: CopyPool) -> bool:
        """Wait for the others, or begin where they have come. False: the job goes its own way."""
        if self._over or job.copy is not copy_here or mover() is None:
            self.dissolve()
            return False
        jobs = [*self._jobs, job]
        if len(jobs) == self._num_batches:
            copy = _JointCopy(self, jobs, _Rows(jobs, self._begins, self._block_nbytes), self._promised)
            self._over = True
            copy.start(pool)
        self._jobs, self._pool = jobs, pool
        return True

    def dissolve(self) -> None:
        """Whoever waits for the others does so no longer. Nothing happens once all have come."""
        if not self._over:
            self._over = True
            for job in self._jobs:
                assert self._pool is not None
                job.start_alone(self._pool)


class _Rows:
    """What several jobs copy, in the order of the bytes they fill: uint64 [rows], ``counts`` of them for each
    block."""

    def __init__(self, jobs: Sequence[CopyJob], begins: U64, block_nbytes: int) -> None:
        to = np.concatenate([job.to for job in jobs])
        by_place = np.argsort(begins)
        block = by_place[np.searchsorted(begins[by_place], to, side="right") - 1]
        order = np.lexsort((to, block))
        self.to = to[order]
        self.source = np.concatenate([job.source for job in jobs])[order]
        self.nbytes = np.concatenate([job.attempt.plan.rows.nbytes for job in jobs])[order]
        self.counts = np.bincount(block, minlength=len(begins)).astype(np.uint32)
        self._ends = np.cumsum(self.counts, dtype=np.intp)
        ends = self.to + self.nbytes
        expected = np.roll(ends, 1)
        expected[self._ends - self.counts] = begins
        filled = np.array_equal(self.to, expected) and (ends[self._ends - 1] - begins == block_nbytes).all()
        assert filled, "the reads do not fill the blocks, each byte once"

    def copy(self, first: int, end: int, stop: Stop, digests: U64) -> bool:
        """Blocks ``first`` to ``end``. False when it was stopped on the way."""
        rows = slice(int(self._ends[first] - self.counts[first]), int(self._ends[end - 1]))
        counts = self.counts[first:end]
        return move_runs(
            self.to[rows], self.source[rows], self.nbytes[rows], counts, stop=stop, digests=digests
        )


class _JointCopy:
    """The one copy in place of those of ``jobs``."""

    def __init__(self, joint: JointRead, jobs: list[CopyJob], rows: _Rows, promised: U64) -> None:
        self._joint = joint
        self._jobs = jobs
        self._rows = rows
        self._promised = promised
        nbytes = int(rows.nbytes.sum())
        chunking = copy_chunking(nbytes, True)
        sizes = np.full(len(promised), nbytes // len(promised), np.uint64)
        self._nbytes = nbytes
        self._chunks = [(first, end) for first, end, _ in windows(sizes, chunking.rows, chunking.nbytes)]
        self._turn = itertools.count()
        self._stop_byte: Stop = np.zeros(1, np.uint8)
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._inside = 0

    def start(self, pool: CopyPool) -> None:
        entered = [job for job in self._jobs if job.attempt.enter(self._kick)]
        if len(entered) < len(self._jobs):
            # One was stopped before all had come.
            for job in entered:
                job.attempt.leave(self._kick)
                job.start_alone(pool)
            return
        self._inside, self._ended = pool.choose(self._nbytes, len(self._chunks))
        if is_small(self._nbytes, len(self._rows.to)):
            self._run()
            return
        for _ in range(self._inside):
            pool.submit(self._run)

    def _kick(self) -> None:
        self._stop_byte[0] = 1

    def _run(self) -> None:
        try:
            while not self._stop_byte[0] and (chunk := next(self._turn)) < len(self._chunks):
                first, end = self._chunks[chunk]
                digests = np.empty(end - first, np.uint64)
                if self._rows.copy(first, end, self._stop_byte, digests):
                    compare(np.arange(first, end), self._promised[first:end], digests)
        except Exception as error:
            # Whatever it is, it is a batch's: who awaits that must hear, and nobody else would.
            self._error = error
            self._kick()
        with self._lock:
            self._inside -= 1
            last = self._inside == 0
        if last:
            self._leave()

    def _leave(self) -> None:
        """No thread copies any more."""
        self._ended()
        stopped = bool(self._stop_byte[0])
        self._joint.verified = not stopped
        for job in self._jobs:
            error: Exception | None = None
            try:
                job.conclude(None)
            except Exception as failure:
                error = failure
            if error is None and stopped:
                again = PathFailed("shm", "a read it was joined with was stopped", interrupted=True)
                error, self._error = self._error or again, None
            chunks = 0 if error else len(job.attempt.plan.chunks)
            job.attempt.leave(self._kick, chunks=chunks, error=error)
