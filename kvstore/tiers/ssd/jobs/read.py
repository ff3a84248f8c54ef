"""Blocks on their way from the disk to a caller's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers.protocols import Bytes
from moonpool.kvstore.tiers.ssd.files.segments import CALL_NBYTES, Segments
from moonpool.kvstore.tiers.ssd.jobs.batch import Batch, ThreadTask, runs
from moonpool.kvstore.tiers.ssd.jobs.threads import IoThreads, Worker


@dataclass(slots=True, eq=False)
class WantedBlock:
    key: BlockKey
    slot: int
    checksum: int
    destination: Bytes | None  # None: only to be verified
    outcome: Literal["", "intact", "corrupt", "unreadable"] = ""  # "": not read
    error: OSError | None = None


class ReadJob:
    """Read each block into a thread's own memory, verify it there and copy it out. The caller's memory has
    verified bytes or is untouched, also when the caller has left."""

    def __init__(
        self, wanted: Sequence[WantedBlock], segments: Segments, max_run: int, on_done: Callable[[], None]
    ) -> None:
        """``max_run``: most blocks read in one call."""
        self._segments = segments
        self._block_nbytes = segments.shape.block_nbytes
        self._runs = runs(wanted, segments.shape.slots_per_segment, max_run)
        self.batch = Batch(on_done)

    def begin(self, threads: IoThreads) -> None:
        shared = iter(self._runs)
        num_tasks = min(threads.num_threads, len(self._runs))
        self.batch.add_jobs(num_tasks)
        for _ in range(num_tasks):
            threads.submit(ThreadTask(self.batch, shared, self._read, self._name), urgent=True)

    def _name(self, run: Sequence[WantedBlock]) -> str:
        path, offset = self._segments.where(run[0].slot)
        return f"reading {path} at {offset}"

    def _read(self, run: Sequence[WantedBlock], worker: Worker) -> None:
        if self.batch.abandoned:
            return
        try:
            checksums = self._fetch(run, worker)
        except OSError as error:
            if len(run) > 1:
                # Find out which of them cannot be read.
                for block in run:
                    self._read([block], worker)
                return
            run[0].outcome, run[0].error = "unreadable", error
            return
        slot_nbytes = self._segments.shape.slot_nbytes
        for position, (block, checksum) in enumerate(zip(run, checksums, strict=True)):
            first = position * slot_nbytes
            if checksum != block.checksum:
                block.outcome = "corrupt"
            else:
                self._deliver(block, worker.buffer[first : first + self._block_nbytes])

    def _fetch(self, run: Sequence[WantedBlock], worker: Worker) -> list[int]:
        """Read the run's slots into the thread's memory. Returns the checksums found."""
        slot_nbytes = self._segments.shape.slot_nbytes
        if len(run) == 1:
            return [self._fetch_chunked(run[0].slot, worker)]
        with worker.calling():
            self._segments.read(run[0].slot, worker.buffer[: len(run) * slot_nbytes].data)
        blocks = worker.buffer[: len(run) * slot_nbytes].reshape(len(run), slot_nbytes)
        return [xxh3_64_intdigest(block[: self._block_nbytes].data) for block in blocks]

    def _fetch_chunked(self, slot: int, worker: Worker) -> int:
        """Checksum each chunk while it is in the CPU cache and another thread reads."""
        digest = xxh3_64()
        slot_nbytes = self._segments.shape.slot_nbytes
        for at in range(0, slot_nbytes, CALL_NBYTES):
            last = min(at + CALL_NBYTES, slot_nbytes)
            with worker.calling():
                self._segments.read(slot, worker.buffer[at:last].data, at)
            digest.update(worker.buffer[at : min(last, self._block_nbytes)].data)
        return digest.intdigest()

    def _deliver(self, block: WantedBlock, found: Bytes) -> None:
        if block.destination is None:
            block.outcome = "intact"
        elif self.batch.begin_touching():
            np.copyto(block.destination, found)
            block.outcome = "intact"
            self.batch.end_touching()
