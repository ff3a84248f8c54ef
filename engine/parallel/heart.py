"""A process telling the others of its group that it runs."""

from __future__ import annotations

import threading

from engine.parallel.board import Board

BEATS_PER_TIMEOUT = 20


class Heart:
    """Beats on a thread of its own, so that only a process that is stopped or gone falls silent: an event
    loop that is busy for a while does not."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._stopped = threading.Event()
        board.beat()
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def stop(self) -> None:
        """Beat no more. Idempotent."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self._board.timeout_s / BEATS_PER_TIMEOUT):
            self._board.beat()
