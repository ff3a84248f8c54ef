"""The queue of batch requests, which are placed one at a time when interactive requests leave room."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BatchQueue:
    """A lock with an order: waiters get it by (priority, order), the smallest first, then by arrival."""

    def __init__(self) -> None:
        self._taken = False
        self._count = 0
        self._waiters: list[tuple[int, float, int, asyncio.Future[None]]] = []
        self._notified: asyncio.Future[None] | None = None

    @property
    def num_waiting(self) -> int:
        return sum(not waiter.done() for *_, waiter in self._waiters)

    @asynccontextmanager
    async def turn(self, priority: int, order_s: float, unless: asyncio.Future[None]) -> AsyncIterator[None]:
        """Hold the lock. When ``unless`` is done first, the body runs without it: the caller must check.

        A cancelled waiter leaves the queue as if it had never been there.
        """
        if self._taken and not unless.done():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiters, (priority, order_s, self._count, waiter))
            self._count += 1
            try:
                await asyncio.wait((waiter, unless), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if waiter.done():
                    self._pass_on()  # the turn and the cancellation came together
                waiter.cancel()
                raise
            if not waiter.done():
                waiter.cancel()
                yield
                return
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next ``notify``, or after ``timeout_s``."""
        self._notified = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._notified,), timeout=timeout_s)

    def notify(self) -> None:
        """A request of any kind has left a stage, so that there may be room."""
        if self._notified is not None and not self._notified.done():
            self._notified.set_result(None)

    def _pass_on(self) -> None:
        self._taken = False
        while self._waiters:
            *_, waiter = heapq.heappop(self._waiters)
            if not waiter.done():
                self._taken = True  # no newcomer may take the lock before this waiter runs
                waiter.set_result(None)
                return
