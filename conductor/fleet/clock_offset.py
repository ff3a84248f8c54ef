"""How far the clock of a node's host is from ours, from the times that its heartbeats carry."""

from __future__ import annotations

from collections import deque

# A heartbeat is on its way for some milliseconds, sometimes longer, never less than none: the quickest of
# these many says how far apart the clocks are.
_SAMPLES = 16
_LEAST = 3


class ClockOffset:
    """``seconds``: their clock less ours, late by the quickest heartbeat's way; None: not known yet."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=_SAMPLES)

    def heard(self, their_unix_s: float, our_unix_s: float) -> None:
        """A heartbeat written at ``their_unix_s`` came; 0: it does not say when."""
        if their_unix_s:
            self._late_s.append(our_unix_s - their_unix_s)

    @property
    def seconds(self) -> float | None:
        return -min(self._late_s) if len(self._late_s) >= _LEAST else None
