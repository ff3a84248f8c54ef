"""How far things have been loaded, drawn on a terminal as a bar each."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TaskProgressColumn, TextColumn

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), DownloadColumn())


class LoadBars:
    """Shown from the first ``update`` until ``close``; nothing of it stays, and nothing is shown where the
    console is no terminal. Log lines, and what ``console`` prints, go above it meanwhile. ``update`` may be
    called from any thread.
    """

    def __init__(self, console: Console) -> None:
        self._bars = Progress(*_COLUMNS, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._handlers: list[logging.StreamHandler[TextIO]] = []
        self._closed = False
        self._lock = threading.Lock()

    def update(self, name: str, nbytes_done: int, nbytes_total: int) -> None:
        """Nothing happens once closed."""
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
        # While the bars are drawn, what stderr is told goes above them; but handlers keep what it was.
        for handler in logging.root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is direct:
                handler.setStream(sys.stderr)
                self._handlers.append(handler)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._tasks:  # else there is nothing to take away, and rich would write an empty line
                self._bars.stop()
            for handler in self._handlers:
                handler.setStream(sys.stderr)
