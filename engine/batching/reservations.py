"""Sequences that wait for blocks before they are queued."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.errors import EngineClosed


class Reservations:
    """A queue by (priority, arrival). ``take``: allocates a sequence's blocks, or returns False."""

    def __init__(self, take: Callable[[Sequence], bool], give_back: Callable[[Sequence], None]) -> None:
        self._take = take
        self._give_back = give_back
        self._queue: list[tuple[Sequence, asyncio.Future[None]]] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first(self) -> Sequence | None:
        """The next sequence to get blocks."""
        return self._queue[0][0] if self._queue else None

    async def wait(self, sequence: Sequence) -> None:
        """Wait until the sequence has its blocks. Raises EngineClosed when the queue is closed meanwhile.

        After an error or a cancellation the sequence has no blocks.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (sequence, granted)
        insort(self._queue, entry, key=lambda e: e[0].order)
        try:
            await granted
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
            if granted.done() and not granted.cancelled():
                # Granted and cancelled in one turn of the loop.
                self._give_back(sequence)
            if self._closed:
                raise EngineClosed("the engine closed while a sequence waited for blocks") from None
            raise

    def grant(self) -> None:
        """Allocate blocks for sequences in order, until there is no room for the first."""
        while self._queue:
            sequence, granted = self._queue[0]
            if not granted.done():
                if not self._take(sequence):
                    return
                granted.set_result(None)
            self._queue.pop(0)

    def close(self) -> None:
        self._closed = True
        for _, granted in self._queue:
            granted.cancel()
        self._queue.clear()
