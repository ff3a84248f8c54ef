"""Where the time of a node's start goes."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from moonpool.engine.node.metrics import NODE_JOIN_PHASE_SECONDS
from moonpool.runtime.service.load_progress import Progress


class JoinPhases:
    """Seconds by phase of one start: call ``ends`` at the end of each, in the order of ``JOIN_PHASES``."""

    def __init__(self, *, first: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """``first``: of the process; a later one needs none of the first phase."""
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._since_s = clock()
        age_s = time.time() - psutil.Process().create_time() if first else 0.0
        self._note("process", max(age_s, 0.0))

    def ends(self, phase: str) -> None:
        """The phase ends now; only its first end counts."""
        if phase not in self.seconds:
            now_s = self._clock()
            self._note(phase, now_s - self._since_s)
            self._since_s = now_s

    def watch(self, progress: Progress) -> Progress:
        """``progress``, which also ends the weights' phase."""

        def watched(nbytes_done: int, nbytes_total: int, name: str) -> None:
            progress(nbytes_done, nbytes_total, name)
            if nbytes_done >= nbytes_total:
                self.ends("weights")

        return watched

    def _note(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = round(seconds, 3)
        NODE_JOIN_PHASE_SECONDS.labels(phase).set(seconds)
