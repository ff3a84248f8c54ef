"""Progress of loading weights: bars on a terminal, lines in the log, and messages to the parent process."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress

from moonpool.runtime.service.child import REPORTS_LOADING

log = logging.getLogger(__name__)

#: progress(nbytes_done, nbytes_total, tensor_name), from any thread
Progress = Callable[[int, int, str], None]

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), DownloadColumn())


class LoadBars:
    """Progress bars, shown from the first ``update`` until ``close``; nothing if the console is no terminal.

    Log lines and output of ``console`` appear above them. ``update`` may be called from any thread.
    """

    def __init__(self, console: Console) -> None:
        self._bars = RichProgress(*_COLUMNS, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._handlers: list[logging.StreamHandler[TextIO]] = []
        self._closed = False
        self._lock = threading.Lock()

    def update(self, name: str, nbytes_done: int, nbytes_total: int) -> None:
        """Set the bar ``name``. No effect after ``close``."""
        with self._lock:
            if self._closed or not self._bars.console.is_terminal:
                return
            if not self._tasks:
                self._show()
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name)
            self._bars.update(self._tasks[name], completed=nbytes_done, total=nbytes_total)

    def _show(self) -> None:
        direct = sys.stderr
        self._bars.start()
        # rich replaces sys.stderr to print above the bars; log handlers still have the old one.
        for handler in logging.root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is direct:
                handler.setStream(sys.stderr)
                self._handlers.append(handler)

    def close(self) -> None:
        """Remove the bars. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._tasks:  # without bars, rich would write an empty line
                self._bars.stop()
            for handler in self._handlers:
                handler.setStream(sys.stderr)


class LoadProgress:
    """A ``Progress``; close it when loading has ended.

    It draws a bar on a terminal that no parent uses, and otherwise logs each tenth. ``tell(nbytes_done,
    nbytes_total)`` is called at each hundredth.
    """

    def __init__(self, name: str, tell: Callable[[int, int], None]) -> None:
        self._name = name
        self._tell = tell
        console = Console(file=sys.stderr)
        self._draws = console.is_terminal and not os.environ.get(REPORTS_LOADING)
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
            # With a bar, only the end is logged.
            if hundredths // 10 > max(before, 0) // 10 and (hundredths == 100 or not self._draws):
                log.info("weights: %d%% of %.1f MB", hundredths, nbytes_total / 1e6)

    def close(self) -> None:
        """Idempotent."""
        self._bars.close()


class TotalProgress:
    """The sum of several progresses. One without reports yet is estimated as large as the others."""

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
