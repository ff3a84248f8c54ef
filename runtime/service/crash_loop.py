"""Detection of processes that fail again soon after every start."""

from __future__ import annotations

MIN_UPTIME_S = 10.0
MAX_SHORT_RUNS = 5


class CrashLoop:
    """Counts consecutive runs that ended within ``MIN_UPTIME_S`` of getting ready."""

    def __init__(self) -> None:
        self._num_short = 0

    def gives_up(self, uptime_s: float) -> bool:
        """Record a run that ended ``uptime_s`` after it was ready (0: never ready); True: do not restart."""
        self._num_short = self._num_short + 1 if uptime_s < MIN_UPTIME_S else 0
        return self._num_short >= MAX_SHORT_RUNS
