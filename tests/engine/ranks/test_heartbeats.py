"""Ranks and their leader are silent when no heartbeat comes, not when one is read late."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool.engine.collectives.board import BoardWord, SharedBoard, SharedMemory
from moonpool.engine.errors import RankLost
from moonpool.engine.ranks.group import RankGroup

TIMEOUT_S = 20.0


@pytest.fixture
def boards() -> Iterator[tuple[SharedBoard, SharedBoard]]:
    """The leader's and rank 1's view; both have been silent for too long."""
    leader = SharedBoard.create(2, 8, TIMEOUT_S)
    rank = SharedBoard(SharedMemory.open(leader.path), 1, 2, TIMEOUT_S)
    for board in (leader, rank):
        board.post(BoardWord.HEARTBEAT_NS, time.monotonic_ns() - int(2e9 * TIMEOUT_S))
    yield leader, rank
    rank.close()
    leader.close()


async def watched(board: SharedBoard) -> list[RankLost]:
    """The losses that a group notices."""
    lost: list[RankLost] = []
    group = SimpleNamespace(
        ranks=[SimpleNamespace(rank=1, where="")], _timeout_s=TIMEOUT_S, abort=lost.append
    )
    watching = asyncio.create_task(RankGroup._watch(cast(Any, group), board))
    await asyncio.wait((watching,), timeout=0.1 * TIMEOUT_S)
    watching.cancel()
    return lost


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_rank_whose_heartbeat_is_read_late_is_not_lost(
    boards: tuple[SharedBoard, SharedBoard], is_late: bool
) -> None:
    leader, rank = boards
    if is_late:
        asyncio.get_running_loop().call_later(0.2, rank.beat)
    lost = await watched(leader)
    assert len(lost) == (0 if is_late else 1)
    assert all("it has been silent for" in str(one) for one in lost)


@pytest.mark.parametrize("is_late", [False, True])
def test_nor_is_a_leader(boards: tuple[SharedBoard, SharedBoard], is_late: bool) -> None:
    leader, rank = boards
    if not is_late:
        with pytest.raises(RankLost, match=r"the leader has been silent for \d+\.\d s"):
            rank.check()
        return
    reading = threading.Timer(0.1, leader.beat)
    reading.start()
    rank.check()
    reading.join()
