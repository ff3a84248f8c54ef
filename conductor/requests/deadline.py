"""The time that one request has: to wait for its turn, then to run; and its own limit, for both."""

from __future__ import annotations

import math


class Deadline:
    """Of one request. All times are of one clock, in seconds."""

    __slots__ = ("_asked_ends_s", "_began_s", "_run_s", "_started_s", "ends_s", "waits")

    def __init__(self, started_s: float, *, wait_s: float, run_s: float, asked_s: float | None) -> None:
        """``asked_s``: the request's own limit, from ``started_s``; None: it has none."""
        self.waits = True  # for its turn
        self._run_s = run_s
        self._started_s = self._began_s = started_s
        self._asked_ends_s = math.inf if asked_s is None else started_s + asked_s
        self.ends_s = min(started_s + wait_s, self._asked_ends_s)

    def run(self, now_s: float) -> None:
        """The request no longer waits."""
        self.waits = False
        self._began_s = now_s
        self.ends_s = min(now_s + self._run_s, self._asked_ends_s)

    def run_s(self, now_s: float) -> float:
        """Seconds that the request may still run, or may run if it begins now."""
        ends_s = min(now_s + self._run_s, self._asked_ends_s) if self.waits else self.ends_s
        return max(ends_s - now_s, 0.0)

    @property
    def limit_s(self) -> float:
        """The limit that ends at ``ends_s``."""
        return self.ends_s - (self._started_s if self.ends_s == self._asked_ends_s else self._began_s)
