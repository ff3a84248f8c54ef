"""Times measured from a node's messages: clock offset of its host, durations of decode steps."""

from __future__ import annotations

from collections import deque

# A heartbeat takes some milliseconds, sometimes more: the quickest of this many gives the offset.
_SAMPLES = 16
_LEAST = 3
# Messages arrive in bursts, so only the time of several steps together is meaningful.
_ENOUGH = 16
_FEW = 4


class ClockOffset:
    """``seconds``: their clock less ours, including the fastest delivery; None: not known yet."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=_SAMPLES)

    def observe(self, their_unix_s: float, our_unix_s: float) -> None:
        """A heartbeat written at ``their_unix_s`` arrived; 0: it has no timestamp."""
        if their_unix_s:
            self._late_s.append(our_unix_s - their_unix_s)

    @property
    def seconds(self) -> float | None:
        return -min(self._late_s) if len(self._late_s) >= _LEAST else None


class StepWindow:
    """Collects consecutive steps without a pause until there are enough to measure."""

    __slots__ = ("_count", "_since_s", "_sum_s", "actual_s", "plain_s")

    def __init__(self) -> None:
        self.plain_s = 0.0  # expected for the last full window
        self.actual_s = 0.0  # measured
        self._count = 0
        self._sum_s = 0.0
        self._since_s = -1.0  # end of the step before the first one; -1: the node was idle

    def add(self, plain_s: float, now_s: float, num_steps: int, *, goes_on: bool) -> bool:
        """A message of ``num_steps`` arrived. Returns True when ``plain_s`` and ``actual_s`` are new.

        ``goes_on``: the batch is not empty, so that the next step follows at once.
        """
        full = False
        if self._since_s >= 0:
            self._count += num_steps
            self._sum_s += plain_s
            full = self._count >= (_ENOUGH if goes_on else _FEW)
            if full:
                self.plain_s, self.actual_s = self._sum_s, now_s - self._since_s
        if full or not goes_on or self._since_s < 0:
            self._count, self._sum_s = 0, 0.0
            self._since_s = now_s if goes_on else -1.0
        return full
