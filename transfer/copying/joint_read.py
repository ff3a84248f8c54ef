"""Reads from several peers that together fill the same blocks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from moonpool.transfer.copying.memcpy import Copy, copy_here, move_runs
from moonpool.transfer.copying.pool import CopyPool, copy_chunking, is_small
from moonpool.transfer.errors import PathFailed
from moonpool.transfer.memory.checksum import compare
from moonpool.transfer.memory.chunks import windows
from moonpool.transfer.memory.region import Region
from moonpool.transfer.native.arrays import U64
from moonpool.transfer.native.compiled_copy import Stop, compiled_copy

Interrupt = Callable[[], None]


class JoinableJob(Protocol):
    """What a joint read needs of the ``CopyJob`` of one batch. to, source, nbytes: uint64 [rows]."""

    to: U64
    source: U64
    nbytes: U64
    copy: Copy
    conclude: Callable[[OSError | None], None]
    enter: Callable[[Interrupt], bool]
    leave: Callable[..., None]
    num_chunks: int

    def start_alone(self, pool: CopyPool) -> None: ...


class JointRead:
    """Blocks of a local region that ``num_batches`` reads fill; pass it to each of them (``Peer.read``).

    Each batch keeps its peer, deadline and errors. If all of them copy from memory that is mapped here, one
    copy fills the blocks in order and verifies them: ``verified`` is then true once the batches have ended.
    Otherwise each batch copies alone, and the caller must verify the blocks.

    A mismatch ends one of the batches with ChecksumMismatch, with the index of the block. If a batch is
    stopped on the way, the others start again without it.
    """

    def __init__(
        self, region: Region, offsets: Sequence[int], nbytes: int, checksums: Sequence[int], num_batches: int
    ) -> None:
        """offsets: of the blocks, each of ``nbytes``, in ``region``. checksums: of each block."""
        self.verified = False
        self._begins = np.array(offsets, np.uint64) + np.uint64(region.address)
        self._block_nbytes = nbytes
        self._expected = np.array(checksums, np.uint64)
        self._num_batches = num_batches
        self._jobs: list[JoinableJob] = []
        self._pool: CopyPool | None = None
        self._over = False  # no job may join any more

    def join(self, job: JoinableJob, pool: CopyPool) -> bool:
        """Wait for the other jobs; the last one starts the copy. False: the job must start alone."""
        if self._over or job.copy is not copy_here or compiled_copy() is None:
            self.dissolve()
            return False
        jobs = [*self._jobs, job]
        if len(jobs) == self._num_batches:
            copy = _JointCopy(self, jobs, _Rows(jobs, self._begins, self._block_nbytes), self._expected)
            self._over = True
            copy.start(pool)
        self._jobs, self._pool = jobs, pool
        return True

    def dissolve(self) -> None:
        """Start the waiting jobs alone. Does nothing once all have joined."""
        if not self._over:
            self._over = True
            for job in self._jobs:
                assert self._pool is not None
                job.start_alone(self._pool)


class _Rows:
    """Rows of several jobs by destination address: uint64 [rows]. counts: number of rows of each block."""

    def __init__(self, jobs: Sequence[JoinableJob], begins: U64, block_nbytes: int) -> None:
        to = np.concatenate([job.to for job in jobs])
        by_address = np.argsort(begins)
        block = by_address[np.searchsorted(begins[by_address], to, side="right") - 1]
        order = np.lexsort((to, block))
        self.to = to[order]
        self.source = np.concatenate([job.source for job in jobs])[order]
        self.nbytes = np.concatenate([job.nbytes for job in jobs])[order]
        self.counts = np.bincount(block, minlength=len(begins)).astype(np.uint32)
        self._ends = np.cumsum(self.counts, dtype=np.intp)
        ends = self.to + self.nbytes
        expected = np.roll(ends, 1)
        expected[self._ends - self.counts] = begins
        filled = np.array_equal(self.to, expected) and (ends[self._ends - 1] - begins == block_nbytes).all()
        assert filled, "the reads must fill each byte of the blocks exactly once"

    def copy(self, first: int, end: int, stop: Stop, digests: U64) -> bool:
        """Copy blocks ``first`` to ``end``. False when it was stopped."""
        rows = slice(int(self._ends[first] - self.counts[first]), int(self._ends[end - 1]))
        counts = self.counts[first:end]
        return move_runs(
            self.to[rows], self.source[rows], self.nbytes[rows], counts, stop=stop, digests=digests
        )


class _JointCopy:
    """One copy that does the work of ``jobs``."""

    def __init__(self, joint: JointRead, jobs: list[JoinableJob], rows: _Rows, expected: U64) -> None:
        self._joint = joint
        self._jobs = jobs
        self._rows = rows
        self._expected = expected
        self._nbytes = int(rows.nbytes.sum())
        chunking = copy_chunking(self._nbytes, True)
        sizes = np.full(len(expected), self._nbytes // len(expected), np.uint64)
        self._chunks = [(first, end) for first, end, _ in windows(sizes, chunking.rows, chunking.nbytes)]
        self._turn = itertools.count()
        self._stop_byte: Stop = np.zeros(1, np.uint8)
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._inside = 0

    def start(self, pool: CopyPool) -> None:
        entered = [job for job in self._jobs if job.enter(self._interrupt)]
        if len(entered) < len(self._jobs):
            # One job was stopped before all had joined.
            for job in entered:
                job.leave(self._interrupt)
                job.start_alone(pool)
            return
        self._inside, self._ended = pool.choose(self._nbytes, len(self._chunks))
        if is_small(self._nbytes, len(self._rows.to)):
            self._run()
            return
        for _ in range(self._inside):
            pool.submit(self._run)

    def _interrupt(self) -> None:
        self._stop_byte[0] = 1

    def _run(self) -> None:
        try:
            while not self._stop_byte[0] and (chunk := next(self._turn)) < len(self._chunks):
                first, end = self._chunks[chunk]
                digests = np.empty(end - first, np.uint64)
                if self._rows.copy(first, end, self._stop_byte, digests):
                    compare(np.arange(first, end), self._expected[first:end], digests)
        except Exception as error:
            # Any error ends a batch: otherwise its waiter would never be told.
            self._error = error
            self._interrupt()
        with self._lock:
            self._inside -= 1
            last = self._inside == 0
        if last:
            self._leave()

    def _leave(self) -> None:
        """The last thread has finished."""
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
                again = PathFailed("shm", "a read joined with this one was stopped", interrupted=True)
                error, self._error = self._error or again, None
            job.leave(self._interrupt, chunks=0 if error else job.num_chunks, error=error)
