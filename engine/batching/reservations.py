"""What waits for blocks beside the scheduler's queue: sequences before they are queued, and adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.errors import EngineClosed
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.runtime import turns


@dataclass(slots=True, eq=False)
class AdapterRoom:
    """Blocks of an adapter, allocated in the turn of a request: see ``runtime.turns``. ``cp``: cp ranks, each
    of which gets as many."""

    num_blocks: int
    cp: int
    tenant: str
    rank: tuple[Any, ...]
    order: tuple[Any, ...]
    block_ids: list[int] = field(default_factory=list)

    def take(self, pool: BlockPool) -> bool:
        """Allocate the blocks. Return False and change nothing where running sequences may need them."""
        found = None
        if self.num_blocks <= pool.num_spare:
            found = pool.allocate_evenly(self.num_blocks, self.cp)
        self.block_ids = found or []
        return found is not None


Reserving = Sequence | AdapterRoom


class Reservations:
    """A queue in the order of turns. ``take``: allocates the blocks of one, or returns False.
    ``on_given_up``: called when one leaves without blocks; there may be room for those after it."""

    def __init__(
        self,
        take: Callable[[Reserving], bool],
        give_back: Callable[[Reserving], None],
        on_given_up: Callable[[], None],
    ) -> None:
        self._take = take
        self._give_back = give_back
        self._on_given_up = on_given_up
        self._queue: list[Reserving] = []
        self._granted: dict[Reserving, asyncio.Future[None]] = {}  # of those in the queue
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first(self) -> Reserving | None:
        """The next one to get blocks."""
        return self._queue[0] if self._queue else None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that waits."""
        return max((one.num_tokens for one in self._queue if isinstance(one, Sequence)), default=0)

    async def wait(self, one: Reserving) -> None:
        """Wait until ``one`` has its blocks. Raises EngineClosed when the queue is closed meanwhile.

        After an error or a cancellation it has no blocks.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._granted[one] = granted
        turns.join(self._queue, one)
        try:
            await granted
        except asyncio.CancelledError:
            if one in self._granted:
                del self._granted[one]
                self._queue.remove(one)
                self._on_given_up()
            if granted.done() and not granted.cancelled():
                # Granted and cancelled in one turn of the loop.
                self._give_back(one)
            if self._closed:
                raise EngineClosed("the engine closed while a request waited for blocks") from None
            raise

    def grant(self, until: tuple[Any, ...] | None) -> None:
        """Allocate blocks in order, to turns before ``until``, as long as there is room for the first."""
        while self._queue:
            one = self._queue[0]
            if until is not None and one.order >= until:
                return
            granted = self._granted[one]
            if not granted.done():
                if not self._take(one):
                    return
                granted.set_result(None)
            del self._queue[0], self._granted[one]

    def close(self) -> None:
        self._closed = True
        for granted in self._granted.values():
            granted.cancel()
        self._queue.clear()
        self._granted.clear()
