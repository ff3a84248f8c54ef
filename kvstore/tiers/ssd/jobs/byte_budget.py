"""A bound on the bytes that are on their way to or from a disk."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """First come, first served. A batch larger than the limit goes alone."""

    def __init__(self, limit_nbytes: int) -> None:
        self.used_nbytes = 0
        self._limit_nbytes = limit_nbytes
        self._waiting: deque[tuple[int, asyncio.Future[bool]]] = deque()

    async def take(self, nbytes: int) -> bool:
        """Wait until so many fit, and take them. False: ``refuse_waiting`` was called; nothing is taken."""
        if not self._waiting and self._fits(nbytes):
            self.used_nbytes += nbytes
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.give(nbytes)
            else:
                self._waiting.remove((nbytes, turn))
                self._admit()
            raise

    def give(self, nbytes: int) -> None:
        self.used_nbytes -= nbytes
        self._admit()

    def refuse_waiting(self) -> None:
        while self._waiting:
            _, turn = self._waiting.popleft()
            turn.set_result(False)

    def _fits(self, nbytes: int) -> bool:
        return not self.used_nbytes or self.used_nbytes + nbytes <= self._limit_nbytes

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, turn = self._waiting.popleft()
            self.used_nbytes += nbytes
            turn.set_result(True)
