"""The prefills of one node, in the order in which the node runs them."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Hashable, Iterator
from operator import attrgetter
from typing import NamedTuple


class _Waiting(NamedTuple):
    order_s: float
    key: Hashable
    compute_s: float
    ready_s: float


class PrefillQueue:
    """One prefill runs to its end; the others follow by ``order_s``, then by arrival.

    ``order_s``: time of arrival plus the time within which later ones may overtake. All ``now_s`` are of one
    clock and never decrease.

    A prefill that should have ended and has not counts as waiting for as long again as it is overdue: the
    longer a node stands still, the longer it probably will.
    """

    __slots__ = ("_due_s", "_ends_s", "_keys", "_running", "_waiting", "_waiting_s")

    def __init__(self) -> None:
        self._running: Hashable = None
        self._ends_s = 0.0
        self._due_s = math.inf
        self._waiting: list[_Waiting] = []
        self._keys: set[Hashable] = set()  # of those
        self._waiting_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + (self._running is not None)

    @property
    def ends_s(self) -> float:
        """Predicted end of the running prefill; in the past if none runs."""
        return self._ends_s

    @property
    def due_s(self) -> float:
        """When the running prefill is overdue: ``ends_s``, or later if its blocks come later; infinite if
        none runs."""
        return self._due_s

    @property
    def waiting_s(self) -> float:
        """Predicted seconds of the waiting prefills."""
        return self._waiting_s

    def add(
        self, key: Hashable, *, order_s: float, compute_s: float, now_s: float, ready_s: float = -math.inf
    ) -> None:
        """``compute_s``: predicted. ``ready_s``: when it will probably have its cached blocks; others compute
        until then. ``key`` must not be in the queue."""
        if self._running is None:
            self._run(_Waiting(order_s, key, compute_s, ready_s), now_s)
            return
        # Behind those of the same order.
        insort(self._waiting, _Waiting(order_s, key, compute_s, ready_s), key=attrgetter("order_s"))
        self._keys.add(key)
        self._waiting_s += compute_s

    def remove(self, key: Hashable, now_s: float) -> bool:
        """The prefill is done, or given up. False: it is not in the queue."""
        if key == self._running:
            self._next(now_s)
            return True
        if key not in self._keys:
            return False
        position = next(i for i, waiting in enumerate(self._waiting) if waiting.key == key)
        waiting = self._waiting.pop(position)
        self._keys.remove(key)
        self._less(waiting.compute_s)
        return True

    def waiting(self, now_s: float) -> Iterator[tuple[Hashable, float, float]]:
        """Key, predicted seconds until the begin, and compute seconds of those that wait, in their order."""
        starts_s = self._left_s(now_s)
        for waiting in self._waiting:
            yield waiting.key, starts_s, waiting.compute_s
            starts_s += waiting.compute_s

    def wait_s(self, now_s: float, order_s: float = math.inf) -> float:
        """Seconds until a prefill that arrives now with this order would begin."""
        left_s = self._left_s(now_s)
        if not self._waiting:
            return left_s
        ahead_s = self._waiting_s
        for waiting in reversed(self._waiting):
            if waiting.order_s <= order_s:
                break
            ahead_s -= waiting.compute_s
        return left_s + max(ahead_s, 0.0)

    def behind(self, order_s: float) -> int:
        """Number of waiting prefills that a prefill with this order would overtake."""
        count = 0
        for waiting in reversed(self._waiting):
            if waiting.order_s <= order_s:
                break
            count += 1
        return count

    def _left_s(self, now_s: float) -> float:
        """Of the running prefill."""
        if now_s < self._ends_s:
            return self._ends_s - now_s
        return now_s - self._due_s if now_s > self._due_s else 0.0

    def _next(self, now_s: float) -> None:
        if not self._waiting:
            self._running, self._ends_s, self._due_s = None, now_s, math.inf
            return
        first = self._waiting.pop(0)
        self._keys.remove(first.key)
        self._run(first, now_s)
        self._less(first.compute_s)

    def _run(self, first: _Waiting, now_s: float) -> None:
        self._running, self._ends_s = first.key, now_s + first.compute_s
        self._due_s = max(now_s, first.ready_s) + first.compute_s

    def _less(self, compute_s: float) -> None:
        # Exactly 0 when nothing waits: sums of floats drift.
        self._waiting_s = self._waiting_s - compute_s if self._waiting else 0.0
