"""Sequences that wait for blocks before they are queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.errors import EngineClosed
from moonpool.runtime import turns


class Reservations:
    """A queue in the order of turns. ``take``: allocates a sequence's blocks, or returns False."""

    def __init__(self, take: Callable[[Sequence], bool], give_back: Callable[[Sequence], None]) -> None:
        self._take = take
        self._give_back = give_back
        self._queue: list[Sequence] = []
        self._granted: dict[Sequence, asyncio.Future[None]] = {}  # of those in the queue
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first(self) -> Sequence | None:
        """The next sequence to get blocks."""
        return self._queue[0] if self._queue else None

    async def wait(self, sequence: Sequence) -> None:
        """Wait until the sequence has its blocks. Raises EngineClosed when the queue is closed meanwhile.

        After an error or a cancellation the sequence has no blocks.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._granted[sequence] = granted
        turns.join(self._queue, sequence)
        try:
            await granted
        except asyncio.CancelledError:
            if sequence in self._granted:
                del self._granted[sequence]
                self._queue.remove(sequence)
            if granted.done() and not granted.cancelled():
                # Granted and cancelled in one turn of the loop.
                self._give_back(sequence)
            if self._closed:
                raise EngineClosed("the engine closed while a sequence waited for blocks") from None
            raise

    def grant(self) -> None:
        """Allocate blocks for sequences in order, until there is no room for the first."""
        while self._queue:
            sequence = self._queue[0]
            granted = self._granted[sequence]
            if not granted.done():
                if not self._take(sequence):
                    return
                granted.set_result(None)
            del self._queue[0], self._granted[sequence]

    def close(self) -> None:
        self._closed = True
        for granted in self._granted.values():
            granted.cancel()
        self._queue.clear()
        self._granted.clear()
