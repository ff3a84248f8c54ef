"""Keeps requests away from a node that just failed, and lets one that comes warm up slowly."""

from __future__ import annotations

_FIRST_S = 0.25
_LONGEST_S = 10.0
# Requests that must have gone well before a node is given as many as placement likes: its caches are cold,
# its connections are not made, and an empty queue would draw everybody at once.
_WARM = 8


class CircuitBreaker:
    """A failure opens it, for longer each time; then one request at a time is let through as a probe.

    Each success lets one more be there at the same time, and from the eighth on any number. A new node
    begins like one that came back. One success ends the row of failures.
    """

    __slots__ = ("_open_until_s", "_successes", "failures")

    def __init__(self) -> None:
        self.failures = 0  # since the last success
        self._successes = 0  # since the last failure, up to _WARM
        self._open_until_s = 0.0

    def fail(self, now_s: float) -> None:
        """Failures while it is open are the same trouble seen by other requests, and do not lengthen it."""
        if now_s < self._open_until_s:
            return
        self._open_until_s = now_s + min(_FIRST_S * 2**self.failures, _LONGEST_S)
        self.failures += 1
        self._successes = 0

    def succeed(self) -> None:
        self.failures = 0
        self._open_until_s = 0.0
        self._successes = min(self._successes + 1, _WARM)

    def closed(self, now_s: float) -> bool:
        return now_s >= self._open_until_s

    def has_room(self, num_requests: int) -> bool:
        """Whether a node that works on so many may be given another one. What the node itself can take is
        another matter."""
        return self._successes >= _WARM or num_requests <= self._successes

    def closes_in_s(self, now_s: float) -> float:
        return max(self._open_until_s - now_s, 0.0)
