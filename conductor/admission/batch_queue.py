"""The queue of batch requests, which are placed one at a time when interactive requests leave room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from moonpool.runtime import turns


@dataclass(eq=False, slots=True)
class _Waiter:
    tenant: str
    rank: tuple[Any, ...]
    order: tuple[Any, ...]
    granted: asyncio.Future[None]


class BatchQueue:
    """A lock with an order: waiters get it by ``order_s``, the smallest first.

    A ``priority`` (lower first) exchanges turns with waiters of the same tenant only.
    """

    def __init__(self) -> None:
        self._taken = False
        self._count = 0
        self._waiters: list[_Waiter] = []
        self._notified: asyncio.Future[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @asynccontextmanager
    async def turn(
        self, tenant: str, priority: int, order_s: float, unless: asyncio.Future[None]
    ) -> AsyncIterator[None]:
        """Hold the lock. When ``unless`` is done first, the body runs without it: the caller must check.

        A cancelled waiter leaves the queue as if it had never been there.
        """
        if unless.done():
            yield
            return
        if self._taken:
            order = (order_s, self._count)
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiter = _Waiter(tenant, (priority, *order), order, granted)
            self._count += 1
            turns.join(self._waiters, waiter)
            try:
                await asyncio.wait((granted, unless), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if granted.done():
                    self._pass_on()  # the turn and the cancellation came together
                else:
                    self._waiters.remove(waiter)
                raise
            if not granted.done():
                self._waiters.remove(waiter)
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
        self._taken = bool(self._waiters)  # no newcomer may take the lock before the next waiter runs
        if self._waiters:
            self._waiters.pop(0).granted.set_result(None)
