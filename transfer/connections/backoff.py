"""How long something that failed is left alone: longer each time, until it works again."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 10.0
# Where the pause has long been the longest.
_MAX_FAILURES = 16


class Backoff:
    """Of one path, or one rail of it. ``paused_until`` is in seconds of ``clock``. Thread-safe enough: what a
    race loses is one failure's count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self.paused_until = 0.0

    @property
    def ready(self) -> bool:
        """May be tried (again)."""
        return self.paused_until <= self._clock()

    def failed(self) -> bool:
        """Once for all that fail together: who was under way when the pause began adds nothing to it. True: a
        pause has begun.
        """
        if not self.ready:
            return False
        self.paused_until = self._clock() + min(_FIRST_PAUSE_S * 2**self._failures, _MAX_PAUSE_S)
        self._failures = min(self._failures + 1, _MAX_FAILURES)
        return True

    def succeeded(self) -> None:
        if self._failures:
            self._failures, self.paused_until = 0, 0.0
