"""How far a node's weights are, as they stream in: for who looks, and for who started it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console

from runtime.load_bars import LoadBars

log = logging.getLogger(__name__)


class LoadProgress:
    """A ``Progress``, from any thread, in a ``with`` that ends when all is loaded, or nothing will be.

    On a terminal it draws a bar, elsewhere it logs at each tenth. ``tell(nbytes_done, nbytes_total)`` is
    called at each hundredth.
    """

    def __init__(self, name: str, tell: Callable[[int, int], None]) -> None:
        self._name = name
        self._tell = tell
        self._console = Console(file=sys.stderr)
        self._bars = LoadBars(self._console)
        self._lock = threading.Lock()
        self._hundredths = -1

    def __call__(self, nbytes_done: int, nbytes_total: int, tensor_name: str) -> None:
        with self._lock:
            before, hundredths = self._hundredths, 100 * nbytes_done // max(nbytes_total, 1)
            if hundredths <= before:
                return
            self._hundredths = hundredths
            self._tell(nbytes_done, nbytes_total)
            self._bars.update(f"{self._name}: weights", nbytes_done, nbytes_total)
            # On a terminal the end is enough.
            if hundredths // 10 > max(before, 0) // 10 and (
                hundredths == 100 or not self._console.is_terminal
            ):
                log.info("weights: %d%% of %.1f MB", hundredths, nbytes_total / 1e6)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.close()
