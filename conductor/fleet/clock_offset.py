"""The clock offset of a node's host, from the timestamps of its heartbeats."""

from __future__ import annotations

from collections import deque

# A heartbeat takes some milliseconds, sometimes more: the quickest of this many gives the offset.
_SAMPLES = 16
_LEAST = 3


class ClockOffset:
    """``seconds``: their clock less ours, including the fastest delivery; None: not known yet."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=_SAMPLES)

    def heard(self, their_unix_s: float, our_unix_s: float) -> None:
        """A heartbeat written at ``their_unix_s`` arrived; 0: it has no timestamp."""
        if their_unix_s:
            self._late_s.append(our_unix_s - their_unix_s)

    @property
    def seconds(self) -> float | None:
        return -min(self._late_s) if len(self._late_s) >= _LEAST else None
