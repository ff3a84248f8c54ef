"""Batch requests wait here for what interactive ones leave, one of them at the door at a time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BatchQueue:
    """A lock whose waiters come in by (priority, order), the smallest first; equal ones as they came."""

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
        """Waits until it is the caller's turn, or ``unless`` is done: then the caller has no turn and must
        see for itself. Cancelled while it waits, it is as if it had not come.
        """
        if self._taken and not unless.done():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiters, (priority, order_s, self._count, waiter))
            self._count += 1
            try:
                await asyncio.wait((waiter, unless), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if waiter.done():
                    self._pass_on()  # the turn came and the cancel with it
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
        """Return after ``timeout_s``, or sooner when a request gave something back."""
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
                self._taken = True  # nobody else may come in between
                waiter.set_result(None)
                return
