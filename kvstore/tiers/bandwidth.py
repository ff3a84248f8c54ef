"""Bytes a second, as seen lately."""

from __future__ import annotations

# How much one observation moves the estimate.
_GAIN = 0.2


class Bandwidth:
    """``nbytes_per_s`` is 0 until something was observed."""

    def __init__(self) -> None:
        self.nbytes_per_s = 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        if nbytes <= 0 or seconds <= 0:
            return
        seen = nbytes / seconds
        self.nbytes_per_s = (
            seen if not self.nbytes_per_s else self.nbytes_per_s + _GAIN * (seen - self.nbytes_per_s)
        )
