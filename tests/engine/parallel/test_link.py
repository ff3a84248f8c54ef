"""What goes through a link arrives as plain torch would have it, or not at all and in time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from engine.config import ModelConfig
from engine.parallel.board import Board, SharedMemory
from engine.parallel.plan import ParallelPlan
from tests.engine.parallel import link_rank
from tests.engine.parallel.test_exact import SHAPE

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 2.0
NUM_RANKS = 3
TENSOR, CONTEXT = ParallelPlan(NUM_RANKS), ParallelPlan(cp=NUM_RANKS)


@contextmanager
def linked(
    path: Path, plan: ParallelPlan, link: str, rounds: int
) -> Iterator[tuple[Board, list[subprocess.Popen[str]]]]:
    """Processes that exchange, and the board of whoever leads them."""
    config = ModelConfig.from_checkpoint(path)
    board = Board.create(NUM_RANKS, 8, TIMEOUT_S)
    exchange = SharedMemory.create("exchange", NUM_RANKS * link_rank.shape(config, plan).rank_nbytes)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words: dict[str, Any] = {
        "model": str(path),
        "tp": plan.tp,
        "cp": plan.cp,
        "link": link,
        "board": board.path,
        "exchange": exchange.path,
        "port": store.port,
        "timeout_s": TIMEOUT_S,
        "rounds": rounds,
    }
    command = [sys.executable, "-m", "tests.engine.parallel.link_rank"]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(NUM_RANKS)
    ]
    try:
        for number, rank in enumerate(ranks):
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(words | {"rank": number}) + "\n")
            rank.stdin.flush()
        yield board, ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        exchange.close()
        board.close()


def next_line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


@pytest.mark.parametrize(
    ("plan", "link", "rounds", "number"),
    [
        (TENSOR, "shm", 1000, signal.SIGKILL),
        pytest.param(TENSOR, "gloo", 60, signal.SIGKILL, marks=pytest.mark.slow),
        (CONTEXT, "shm", 1000, signal.SIGKILL),
        pytest.param(CONTEXT, "gloo", 60, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(TENSOR, "shm", 5000, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(TENSOR, "gloo", 500, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value).replace(" × ", "-").replace(" ", ""),
)
def test_exchanges_are_those_of_plain_torch_until_a_rank_is_lost(
    make_checkpoint, plan, link, rounds, number
) -> None:
    """Uneven runs, empty ones, the largest size, between processes; then one is lost in the midst of them,
    and the others end in time."""
    with linked(make_checkpoint("llama", **SHAPE).path, plan, link, rounds) as (board, ranks):
        for rank in ranks:
            assert next_line(rank) == "all were right"
        ranks[2].send_signal(number)
        lost_s = time.monotonic()
        # What a leader does that has noticed; what waits in Gloo does not hear the board.
        board.abort(2)
        if link == "gloo":
            ranks[1].kill()
        for rank in ranks[:1] if link == "gloo" else ranks[:2]:
            at_s, _, error = next_line(rank).partition(" ")
            assert "is lost" in error
            # The machine is shared: what takes longer than this is not the bound.
            assert float(at_s) - lost_s < TIMEOUT_S + 2.5
            assert rank.wait() == 3
