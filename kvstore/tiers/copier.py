"""Copies in memory, each verified by its checksum; large batches on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from moonpool.kvstore.tiers.protocols import Bytes
from moonpool.runtime.cancellation import outlast
from moonpool.transfer.metrics import moving_average

Result = TypeVar("Result")

# Up to this size the copy takes about half a millisecond; waking a thread on a busy machine takes longer.
_INLINE_NBYTES = 4 << 20


class Copier:
    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="moonpool-copy")

    async def copy(
        self, sources: Sequence[Bytes], destinations: Sequence[Bytes], checksums: Sequence[int]
    ) -> int | None:
        """Copy each source; returns the first that does not match its checksum, or None.

        Those before it are complete and verified. A cancelled call first lets the copy end: nothing is
        written to ``destinations`` after it has returned or raised.
        """
        return await self._run(sources, lambda: _copy(sources, destinations, checksums))

    async def copy_and_hash(self, sources: Sequence[Bytes], destinations: Sequence[Bytes]) -> list[int]:
        """Copy each source; returns the checksums of the copies. Cancelled as ``copy``."""
        return await self._run(sources, lambda: _copy_and_hash(sources, destinations))

    async def _run(self, sources: Sequence[Bytes], work: Callable[[], Result]) -> Result:
        if sum(source.nbytes for source in sources) <= _INLINE_NBYTES:
            return work()
        return await self.run(work)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run on a thread. A cancelled call first lets it end, however often it is cancelled."""
        copying = asyncio.get_running_loop().run_in_executor(self._threads, work)
        return await outlast(copying)

    async def close(self) -> None:
        """Wait for running copies without blocking the loop, which some of them need."""
        await asyncio.to_thread(self._threads.shutdown)


def _copy(sources: Sequence[Bytes], destinations: Sequence[Bytes], checksums: Sequence[int]) -> int | None:
    for i, source in enumerate(sources):
        destination = destinations[i]
        np.copyto(destination, source)
        # Of the copy, which is in the cache: this detects a bad source and a bad copy alike.
        if xxh3_64_intdigest(destination.data) != checksums[i]:
            return i
    return None


def _copy_and_hash(sources: Sequence[Bytes], destinations: Sequence[Bytes]) -> list[int]:
    checksums = []
    for source, destination in zip(sources, destinations, strict=True):
        np.copyto(destination, source)
        checksums.append(xxh3_64_intdigest(destination.data))
    return checksums


class Bandwidth:
    """A moving average; ``nbytes_per_s`` is 0 before the first observation."""

    def __init__(self) -> None:
        self.nbytes_per_s = 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        if nbytes > 0 and seconds > 0:
            self.nbytes_per_s = moving_average(self.nbytes_per_s, nbytes / seconds)
