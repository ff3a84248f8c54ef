"""Pauses after failures, longer each time."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 10.0
# Beyond this the pause does not grow.
_MAX_FAILURES = 16


class Backoff:
    """The pause of a path or rail. paused_until: in seconds of ``clock``. A race may lose one failure."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self.paused_until = 0.0

    @property
    def ready(self) -> bool:
        """Whether it may be tried."""
        return self.paused_until <= self._clock()

    def failed(self) -> bool:
        """Begin a pause. False: one had begun already, so failures at the same time count once."""
        if not self.ready:
            return False
        self.paused_until = self._clock() + min(_FIRST_PAUSE_S * 2**self._failures, _MAX_PAUSE_S)
        self._failures = min(self._failures + 1, _MAX_FAILURES)
        return True

    def succeeded(self) -> None:
        if self._failures:
            self._failures, self.paused_until = 0, 0.0
