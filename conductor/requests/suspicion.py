"""Requests that nodes lost a rank or their device with: tried once more, one at a time, then refused."""

from __future__ import annotations

import asyncio

# Lives of nodes that a request may end: without a token in between, and in all.
_MAX_LIVES = 2
_MAX_LIVES_IN_ALL = 4


class Suspicion:
    """Of one request. Several requests are in the step that ends a life, and one of them may be the cause.

    So that the next life names its cause, one suspect of this conductor runs at a time, until it gets a token
    from a decode node.
    """

    def __init__(self, turns: asyncio.Lock) -> None:
        """``turns``: of all suspects of the conductor."""
        self.ended: list[str] = []  # how each life ended
        self._num_since_token = 0
        self._turns = turns
        self._has_turn = False

    @property
    def is_proven(self) -> bool:
        return self._num_since_token >= _MAX_LIVES or len(self.ended) >= _MAX_LIVES_IN_ALL

    def add(self, how: str) -> None:
        """A life ended in a step with the request."""
        self.ended.append(how)
        self._num_since_token += 1

    async def turn(self, unless: asyncio.Future[None]) -> None:
        """Wait until no other suspect runs, or ``unless`` is done. Returns at once without a suspicion."""
        if not self._num_since_token or self._has_turn:
            return
        turn = asyncio.ensure_future(self._turns.acquire())
        try:
            await asyncio.wait((turn, unless), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._has_turn = turn.done() and not turn.cancelled()
            turn.cancel()

    def clear(self) -> None:
        """The request made progress, or ended: let the next suspect run. Idempotent."""
        self._num_since_token = 0
        if self._has_turn:
            self._has_turn = False
            self._turns.release()
