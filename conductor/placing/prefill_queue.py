"""What waits for prefill on one node, in the order in which the node will run it."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Waiting:
    order_s: float
    number: int  # of arrival: what decides between equals
    key: Hashable
    compute_s: float

    @property
    def order(self) -> tuple[float, int]:
        return self.order_s, self.number


class PrefillQueue:
    """One prefill runs to its end; the others follow by ``order_s``, then by arrival.

    ``order_s`` is the moment of arrival plus the time within which later ones may pass. Every ``now_s`` is of
    the same clock, and never earlier than the one before.
    """

    __slots__ = ("_ends_s", "_number", "_running", "_waiting", "_waiting_s")

    def __init__(self) -> None:
        self._running: Hashable = None
        self._ends_s = 0.0  # when the running one is predicted to end
        self._waiting: list[_Waiting] = []
        self._waiting_s = 0.0  # predicted seconds of all that wait
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting) + (self._running is not None)

    @property
    def ends_s(self) -> float:
        """When the one that runs is predicted to end; nothing runs: in the past."""
        return self._ends_s

    @property
    def waiting_s(self) -> float:
        """Predicted seconds of work that has not begun."""
        return self._waiting_s

    def add(self, key: Hashable, *, order_s: float, compute_s: float, now_s: float) -> None:
        """``compute_s``: predicted. ``key`` must not be in the queue."""
        if self._running is None:
            self._running, self._ends_s = key, now_s + compute_s
            return
        insort(self._waiting, _Waiting(order_s, self._number, key, compute_s), key=_order)
        self._number += 1
        self._waiting_s += compute_s

    def remove(self, key: Hashable, now_s: float) -> bool:
        """It is done, or given up. False: it is not here."""
        if key == self._running:
            self._next(now_s)
            return True
        for i, waiting in enumerate(self._waiting):
            if waiting.key == key:
                del self._waiting[i]
                self._less(waiting.compute_s)
                return True
        return False

    def wait_s(self, now_s: float, order_s: float = math.inf) -> float:
        """Seconds until a prefill that arrives now with this order would begin."""
        running_s = self._ends_s - now_s
        if not self._waiting:
            return running_s if running_s > 0 else 0.0
        ahead_s = self._waiting_s
        for waiting in reversed(self._waiting):
            if waiting.order_s <= order_s:
                break
            ahead_s -= waiting.compute_s
        return max(running_s, 0.0) + max(ahead_s, 0.0)

    def behind(self, order_s: float) -> int:
        """How many of those that wait would wait longer for a prefill with this order."""
        count = 0
        for waiting in reversed(self._waiting):
            if waiting.order_s <= order_s:
                break
            count += 1
        return count

    def _next(self, now_s: float) -> None:
        if not self._waiting:
            self._running, self._ends_s = None, now_s
            return
        first = self._waiting.pop(0)
        self._running, self._ends_s = first.key, now_s + first.compute_s
        self._less(first.compute_s)

    def _less(self, compute_s: float) -> None:
        # Back to exactly nothing when nothing is left: sums of floats drift.
        self._waiting_s = self._waiting_s - compute_s if self._waiting else 0.0


def _order(waiting: _Waiting) -> tuple[float, int]:
    return waiting.order
