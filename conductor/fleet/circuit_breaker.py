"""The circuit breaker of one node: no requests after failures, few while it warms up."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

log = logging.getLogger(__name__)

_FIRST_S = 0.25
_LONGEST_S = 10.0
# Successes before a node gets any number of requests: its caches are cold, its connections are not made,
# and its empty queue would attract every request at once.
_WARM = 8
# A node that answers with errors is avoided after this many in a row: one request that no node can serve
# must not open the breakers of all.
_IN_A_ROW = 3
# The same holds for answers that take this many times the prediction, and this much longer.
_SLOW_RATIO = 8.0
_SLOW_S = 0.5


class CircuitBreaker:
    """Each failure opens it for longer. Then one request is let through as a probe.

    Each success allows one more request at a time, and from the eighth on any number. A new node starts like
    one that came back. One success resets the time that the next failure opens it for.
    """

    def __init__(self, node_id: str, clock: Callable[[], float], on_change: Callable[[], None]) -> None:
        self._node_id = node_id
        self._clock = clock
        self._on_change = on_change
        self._failures = 0  # since the last success
        self._successes = 0  # since the last failure, up to _WARM
        self._errors = 0  # in a row
        self._slow = 0  # in a row
        self._open_until_s = 0.0

    def closed(self, now_s: float) -> bool:
        return now_s >= self._open_until_s

    def closes_in_s(self, now_s: float) -> float:
        return max(self._open_until_s - now_s, 0.0)

    def room(self, num_requests: int) -> float:
        """How many requests more a node that works on ``num_requests`` may get."""
        return math.inf if self._successes >= _WARM else max(self._successes + 1 - num_requests, 0)

    def succeeded(self) -> None:
        """The node served a request."""
        self._errors = 0
        if not self._slow:
            self._failures = 0
            self._open_until_s = 0.0
            self._successes = min(self._successes + 1, _WARM)
            self._on_change()

    def took(self, predicted_s: float, actual_s: float) -> None:
        """Work that depends on this node alone took ``actual_s``."""
        if actual_s < predicted_s * _SLOW_RATIO + _SLOW_S:
            self._slow = 0
            return
        self._slow += 1
        if self._slow % _IN_A_ROW == 0:
            log.warning(
                "%s gets no requests for a while: it took %.2g s instead of %.2g s, %d times in a row",
                *(self._node_id, actual_s, predicted_s, self._slow),
            )
            self.lost()

    def erred(self) -> None:
        """The node answered with an error."""
        self._errors += 1
        if self._errors >= _IN_A_ROW:
            self.lost()

    def lost(self) -> None:
        """The node failed. While the breaker is open this is the same failure, and does not extend it."""
        now_s = self._clock()
        if self.closed(now_s):
            self._open_until_s = now_s + min(_FIRST_S * 2**self._failures, _LONGEST_S)
            self._failures += 1
            self._successes = 0
        self._on_change()
