"""Chunks on their way from memory to disk: all go there, and none is evicted that is not there yet."""

from __future__ import annotations

import asyncio

from moonpool.kvstore.store import TieredStore

_FLUSH_S = 60.0  # a disk that takes longer is given up on until more comes


class WriteBehind:
    """The store gives up what its own queue to the disk has no room for; this has it written all the same.

    Before something makes the store evict, ``await room()``. Nothing waits where there is no disk.
    """

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._capacity = store.host.stats.num_blocks
        self._num_new = 0  # chunks that came since the flush under way began
        self._num_leaving = 0  # chunks of that flush
        self._task: asyncio.Task[None] | None = None

    def add(self, num_chunks: int) -> None:
        """So many chunks have come to memory."""
        if self._store.ssd is None or not num_chunks:
            return
        self._num_new += num_chunks
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="objects to disk")

    async def room(self) -> None:
        """Until at most half of memory is not on disk yet: the older half can be evicted without a loss."""
        while self._task is not None and self._num_new + self._num_leaving > self._capacity // 2:
            await asyncio.shield(self._task)

    async def done(self) -> None:
        """Until all of it is on disk, or the disk has been given up on."""
        while self._task is not None:
            await asyncio.shield(self._task)

    async def _run(self) -> None:
        try:
            while self._num_new:
                self._num_new, self._num_leaving = 0, self._num_new
                await self._store.flush(_FLUSH_S)
                self._num_leaving = 0
        finally:
            self._num_leaving = 0
            self._task = None
