"""How far loading is, as it is seen: by who looks at the terminal or the log, and by who started us."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from rich.console import Console

from moonpool.runtime.service.child import HEARS_LOADING
from moonpool.runtime.service.progress_bars import LoadBars

log = logging.getLogger(__name__)

#: progress(nbytes_done, nbytes_total, tensor_name), from any thread
Progress = Callable[[int, int, str], None]


class LoadProgress:
    """A ``Progress``, to be closed when all is loaded, or nothing will be.

    On a terminal of our own it draws a bar, elsewhere it logs at each tenth. ``tell(nbytes_done,
    nbytes_total)`` is called at each hundredth.
    """

    def __init__(self, name: str, tell: Callable[[int, int], None]) -> None:
        self._name = name
        self._tell = tell
        console = Console(file=sys.stderr)
        self._draws = console.is_terminal and not os.environ.get(HEARS_LOADING)
        self._bars = LoadBars(console)
        self._lock = threading.Lock()
        self._hundredths = -1

    def __call__(self, nbytes_done: int, nbytes_total: int, tensor_name: str) -> None:
        with self._lock:
            before, hundredths = self._hundredths, 100 * nbytes_done // max(nbytes_total, 1)
            if hundredths <= before:
                return
            self._hundredths = hundredths
            self._tell(nbytes_done, nbytes_total)
            if self._draws:
                self._bars.update(f"{self._name}: weights", nbytes_done, nbytes_total)
            # Where there is a bar, its end is enough.
            if hundredths // 10 > max(before, 0) // 10 and (hundredths == 100 or not self._draws):
                log.info("weights: %d%% of %.1f MB", hundredths, nbytes_total / 1e6)

    def close(self) -> None:
        """Idempotent."""
        self._bars.close()


class TotalProgress:
    """What several have read together, from each one's own reports. Who has not begun is taken to read as
    much as the others do."""

    def __init__(self, report: Progress | None, count: int) -> None:
        self._report = report
        self._done = [0] * count
        self._total = [0] * count

    def of(self, number: int) -> Progress:
        def progress(done: int, total: int, name: str) -> None:
            self._done[number], self._total[number] = done, total
            if self._report is not None:
                known = [nbytes for nbytes in self._total if nbytes]
                expected = sum(known) * len(self._total) // max(len(known), 1)
                self._report(sum(self._done), expected, name)

        return progress
