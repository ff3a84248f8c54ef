"""Limits of exchanges over NCCL, and torch.distributed's names, over a stand-in for torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moonpool.engine.collectives import process_group, torch_distributed
from moonpool.engine.collectives.board import SharedBoard
from moonpool.engine.errors import RankLost

START = timedelta(seconds=120)
STEP = timedelta(seconds=5)


class Dist:
    """torch.distributed of one rank: keeps the time limit of each group."""

    def __init__(self) -> None:
        self.limits: dict[Any, timedelta] = {}
        self.ends: list[str] = []
        self.destroy_process_group = lambda: self.ends.append("destroyed")

    def init_process_group(self, backend: str, *, timeout: timedelta, **_: object) -> None:
        assert backend == "nccl"
        self.limits[None] = timeout

    def new_group(self, ranks: list[int], timeout: timedelta) -> Any:
        self.limits[tuple(ranks)] = timeout
        return tuple(ranks)


@pytest.fixture
def dist(monkeypatch: pytest.MonkeyPatch) -> Dist:
    stand_in = Dist()
    monkeypatch.setattr(process_group, "dist", stand_in)
    set_limit = lambda limit, group: stand_in.limits.__setitem__(group, limit)  # noqa: E731
    monkeypatch.setattr(process_group, "_set_pg_timeout", set_limit)
    monkeypatch.setattr(process_group, "_abort_process_group", lambda: stand_in.ends.append("aborted"))
    return stand_in


def opened(board: SharedBoard) -> process_group.ProcessGroup:
    store = SimpleNamespace(set=lambda *_: None, wait=lambda *_: None)
    return process_group.ProcessGroup(
        "nccl", store, board, torch.device("cuda", 0), address="", start_timeout_s=120.0
    )


@pytest.fixture
def board() -> Any:
    board = SharedBoard.create(2, 8, 5.0)
    yield board
    board.close()


def test_exchanges_may_take_long_until_all_is_compiled(dist, board) -> None:
    group = opened(board)
    group.groups([[0], [1], [0, 1]])
    assert dist.limits == dict.fromkeys([None, (0,), (1,), (0, 1)], START)
    group.limit_steps()
    assert dist.limits == {None: STEP, (0,): STEP, (1,): START, (0, 1): STEP}, "the second group is not ours"


@pytest.mark.parametrize("lost", [False, True])
def test_the_end_of_a_group_does_not_wait_for_a_lost_rank(dist, board, lost) -> None:
    group = opened(board)
    if lost:
        board.abort(1)
    group.close()
    assert dist.ends == (["aborted"] if lost else ["destroyed"])


def test_a_group_of_which_a_rank_is_lost_at_its_start_is_closed(dist, board, monkeypatch) -> None:
    """Else the next life of a node, in the same process, could join none."""

    def fails(ranks: list[int], timeout: timedelta) -> Any:
        raise RuntimeError("Connection reset by peer")

    group = opened(board)
    monkeypatch.setattr(dist, "new_group", fails)
    with pytest.raises(RankLost):
        group.groups([[0, 1]])
    assert dist.ends == ["aborted"]


@pytest.mark.parametrize("name", ["all_gather_single", "all_gather_into_tensor"])  # of torch 2.13, 2.11
def test_a_collective_is_found_by_each_of_its_names(monkeypatch, name) -> None:
    monkeypatch.setattr(torch_distributed, "dist", SimpleNamespace(**{name: "found"}))
    assert torch_distributed._named("all_gather_single", "all_gather_into_tensor") == "found"
