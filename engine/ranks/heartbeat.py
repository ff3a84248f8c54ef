"""A rank telling the others of its group that it runs."""

from __future__ import annotations

from moonpool.engine.collectives.board import SharedBoard
from moonpool.runtime.service import heartbeat as heart


class Heartbeat(heart.Heartbeat):
    """Beats on the group's board, several times within its timeout."""

    def __init__(self, board: SharedBoard) -> None:
        super().__init__(board.beat, board.timeout_s / heart.BEATS_PER_TIMEOUT)
