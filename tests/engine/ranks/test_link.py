"""What goes through a link arrives as plain torch would have it, or not at all and in time."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.board import SharedBoard, SharedMemory
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.ranks.link_factory import choose_link, exchange_shape, open_store
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.runtime.config.options import EngineOptions, ParallelOptions
from moonpool.runtime.errors import ConfigError
from tests.engine.ranks import link_rank
from tests.engine.ranks.test_exact import SHAPE
from tests.forked import PipedProcess, start_module
from tests.processes import stop

TIMEOUT_S = 2.0
TENSOR, CONTEXT, STAGES = ParallelPlan(3), ParallelPlan(cp=3), ParallelPlan(pp=3)
CPU = torch.device("cpu")


@contextmanager
def linked(
    path: Path, plan: ParallelPlan, link: str, hosts: int, rounds: int
) -> Iterator[tuple[list[SharedBoard], list[PipedProcess]]]:
    """Processes that exchange, and the boards of those who lead them: machines share none, nor memory, and
    have each an address of their own."""
    config = ModelConfig.from_checkpoint(path)
    words = {word: getattr(plan, word) for word in ("tp", "pp", "cp", "ep")}
    words |= {"hosts": hosts, "timeout_s": TIMEOUT_S}
    parallel = ParallelOptions(**words, listen="127.0.0.1:0" if hosts > 1 else "")
    store = open_store("127.0.0.1")
    assignment = Assignment(
        **dict.fromkeys(("rank", "num_blocks"), 0),
        model=str(path),
        dtype="float32",
        device="cpu",
        link=choose_link(link, CPU, hosts),
        options=EngineOptions(block_size=8, max_batch_tokens=link_rank.MAX_TOKENS, parallel=parallel),
        max_len=link_rank.MAX_TOKENS,
        model_len=link_rank.MAX_TOKENS,
        store=f"127.0.0.1:{store.port}",
    )
    nbytes = plan.world_size * exchange_shape(assignment, config).rank_nbytes
    boards = [SharedBoard.create(plan.world_size, 8, TIMEOUT_S) for _ in range(hosts)]
    exchanges = [SharedMemory.create("exchange", nbytes) for _ in range(hosts)]
    ranks = [start_module("tests.engine.ranks.link_rank") for _ in range(plan.world_size)]
    try:
        for number, rank in enumerate(ranks):
            host = number * hosts // plan.world_size
            assigned = replace(
                assignment,
                rank=number,
                board=boards[host].path,
                exchange=exchanges[host].path,
                address=f"127.0.0.{1 + host}",
            )
            line = json.dumps({"assignment": assigned.pack(), "rounds": rounds})
            rank.stdin.write(line.encode() + b"\n")
            rank.stdin.flush()
        yield boards, ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.stdin.close()
            rank.stdout.close()
            rank.wait()
        for memory in [*exchanges, *boards]:
            memory.close()


def next_line(rank: PipedProcess) -> str:
    return rank.stdout.readline().decode().strip()


def last_line(rank: PipedProcess) -> str:
    """The first that says something else than that all were right."""
    while (line := next_line(rank)) == "all were right":
        pass
    return line


@pytest.mark.parametrize(
    ("plan", "link", "hosts", "rounds", "number"),
    [
        (TENSOR, "auto", 1, 1000, signal.SIGKILL),
        pytest.param(TENSOR, "gloo", 1, 60, signal.SIGKILL, marks=pytest.mark.slow),
        (CONTEXT, "auto", 1, 1000, signal.SIGKILL),
        pytest.param(CONTEXT, "gloo", 1, 60, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(STAGES, "auto", 1, 1000, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(STAGES, "gloo", 1, 60, signal.SIGSTOP, marks=pytest.mark.slow),
        (ParallelPlan(2, 2), "auto", 2, 60, signal.SIGSTOP),
        pytest.param(ParallelPlan(pp=4), "auto", 2, 200, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(STAGES, "auto", 3, 200, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(TENSOR, "auto", 1, 5000, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(TENSOR, "gloo", 1, 500, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value).replace(" × ", "-").replace(" ", ""),
)
def test_exchanges_are_those_of_plain_torch_until_a_rank_is_lost(
    make_checkpoint, plan, link, hosts, rounds, number
) -> None:
    """Uneven runs, empty ones, the largest size, between processes, within machines and between them; then
    one is lost in the midst of them, and the others end in time."""
    path = make_checkpoint("llama", **SHAPE).path
    with linked(path, plan, link, hosts, rounds) as (boards, ranks):
        for rank in ranks:
            assert next_line(rank) == "all were right"
        ranks[-1].send_signal(number)
        lost_s = time.monotonic()
        # What a leader does that has noticed.
        for board in boards:
            board.abort(len(ranks) - 1)
        for rank in ranks[:-1]:
            at_s, _, error = last_line(rank).partition(" ")
            assert "is lost" in error
            # Gloo itself would wait for ever. The machine is shared: it takes a moment where that is free.
            assert float(at_s) - lost_s < 30
            assert rank.wait() == 3


def test_a_rank_that_takes_long_is_waited_for_by_those_of_other_machines(make_checkpoint) -> None:
    """Only the board says who is lost; Gloo, left to itself, gave up after the timeout."""
    path = make_checkpoint("llama", **SHAPE).path
    with linked(path, ParallelPlan(pp=2), "auto", 2, 30) as (_, ranks):
        for rank in ranks:
            assert next_line(rank) == "all were right"
        stop(ranks[1].pid)
        time.sleep(2 * TIMEOUT_S)
        ranks[1].send_signal(signal.SIGCONT)
        for rank in ranks:
            for _ in range(3):
                assert next_line(rank) == "all were right"


def test_memory_is_no_link_between_machines() -> None:
    with pytest.raises(ConfigError, match=r"the 2 machines of the ranks share no memory: use auto"):
        choose_link("shm", CPU, 2)
    assert choose_link("gloo", CPU, 2) == "gloo"
