"""Decisions a second against the number of nodes and of blocks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from time import thread_time

import numpy as np

from moonpool.bench.conductor.population import Population
from moonpool.runtime.reports.report import Row

_WARM_UP = 200

# (nodes, blocks): what is asked for 1,000 nodes, and how cost grows from 256 to 4,096.
_GOAL = (1024, 1_000_000)
QUICK = ((16, 100_000), (256, 100_000), _GOAL, (4096, 1_000_000))
FULL = (
    *((16, 10_000), (16, 1_000_000), (64, 1_000_000), (256, 1_000_000), _GOAL, (4096, 1_000_000)),
    *((1024, 10_000), (1024, 100_000), (1024, 10_000_000)),
)


def scale_rows(
    sizes: Sequence[tuple[int, int]], policy: str, decisions: int, note: Callable[[str], None]
) -> list[Row]:
    """One case a size; the last row compares 4,096 nodes with 256."""
    rows, medians = [], dict[int, float]()
    for num_nodes, num_blocks in sizes:
        note(f"{num_nodes:,} nodes, {num_blocks:,} blocks")
        seconds = measure(Population(num_nodes, num_blocks, policy), decisions)
        rows += _case(num_nodes, num_blocks, policy, seconds)
        medians[num_nodes] = float(np.median(seconds))
    if {256, 4096} <= medians.keys():
        growth = medians[4096] / medians[256]
        rows.append(
            Row("growth", "cost at 4,096 nodes over 256", growth, "×", limit="at most", limit_value=3.0)
        )
    return rows


def measure(population: Population, decisions: int) -> list[float]:
    """CPU seconds of each decision, looking its blocks up included; making up the prompt is not.

    Of the thread, so that other work on the machine is not counted: a conductor has a core of its own.
    """
    seconds, now_s = [], 0.0
    gc.collect()
    gc.freeze()  # millions of keys: a conductor's collector does not go through them either
    try:
        for i in range(_WARM_UP + decisions):
            question = population.question()
            now_s += 1e-3
            began_s = thread_time()
            population.decide(question, now_s)
            if i >= _WARM_UP:
                seconds.append(thread_time() - began_s)
    finally:
        gc.unfreeze()
    return seconds


def _case(num_nodes: int, num_blocks: int, policy: str, seconds: list[float]) -> list[Row]:
    case = f"{policy}, {num_nodes:,} nodes, {num_blocks:,} blocks, prompts of 128 blocks"
    p50, p99 = (float(np.quantile(seconds, q)) * 1e6 for q in (0.5, 0.99))
    rate = len(seconds) / sum(seconds)
    at_goal = (num_nodes, num_blocks) == _GOAL
    return [
        Row(
            case,
            "decisions",
            rate,
            "decisions/s",
            limit="at least" if at_goal else None,
            limit_value=2000.0 if at_goal else None,
        ),
        Row(
            case,
            "CPU of a decision, p99",
            p99,
            "µs",
            p50=p50,
            p99=p99,
            limit="at most" if at_goal else None,
            limit_value=1000.0 if at_goal else None,
        ),
    ]
