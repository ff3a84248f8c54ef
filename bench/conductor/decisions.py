"""Decisions per second against the number of nodes and of blocks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import thread_time

from moonpool.bench.conductor.population import Population
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import percentiles
from moonpool.runtime.reports.report import Curve, Row

_WARM_UP = 200
# (nodes, blocks): 1,024 nodes have the goal; cost grows from 256 to 4,096.
_QUICK = ((16, 10_000), (64, 10_000))
_USUAL = ((16, 100_000), (256, 100_000), (1024, 1_000_000), (4096, 1_000_000))
_FULL = (
    *((16, 10_000), (16, 1_000_000), (64, 1_000_000), (256, 1_000_000), (1024, 1_000_000)),
    *((4096, 1_000_000), (1024, 10_000), (1024, 100_000), (1024, 10_000_000)),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """decisions: for each size. requests: over HTTP."""

    policy: str
    decisions: int
    requests: int
    full: bool


def scale_rows(run: Run, settings: Settings) -> Iterator[Row]:
    """One case a size; the last row compares 4,096 nodes with 256."""
    medians_s: dict[int, float] = {}
    lines: dict[str, list[tuple[float, float]]] = {}
    for num_nodes, num_blocks in _FULL if settings.full else _QUICK if run.quick else _USUAL:
        run.say(f"{num_nodes:,} nodes, {num_blocks:,} blocks")
        seconds = measure(Population(num_nodes, num_blocks, settings.policy), settings.decisions)
        case = f"{settings.policy}, {num_nodes:,} nodes, {num_blocks:,} blocks, prompts of 128 blocks"
        yield Row(case, "decisions", len(seconds) / sum(seconds), "decisions/s")
        cost = percentiles(seconds, 1e6)
        yield Row(case, "CPU of a decision, p99", cost["p99"], "µs", **cost)
        medians_s[num_nodes] = median(seconds)
        for name, value in (("p50", cost["p50"]), ("p99", cost["p99"])):
            lines.setdefault(f"{num_blocks:,} blocks, {name}", []).append((num_nodes, value))
    for name, points in lines.items():
        title = f"{settings.policy}: prompts of 128 blocks"
        run.curves.append(Curve(title, name, "nodes", "CPU µs of a decision", points))
    if {256, 4096} <= medians_s.keys():
        yield Row("growth", "cost at 4,096 nodes over 256", medians_s[4096] / medians_s[256], "×")


def measure(population: Population, decisions: int) -> list[float]:
    """CPU seconds of each decision with the look-up of its blocks, without making the prompt.

    They are the thread's: other work on the machine does not count, as a conductor has a core of its own.
    """
    seconds, now_s = [], 0.0
    gc.collect()
    gc.freeze()  # millions of keys, which a conductor's collector does not go through either
    try:
        for i in range(_WARM_UP + decisions):
            request = population.request()
            now_s += 1e-3
            began_s = thread_time()
            population.decide(request, now_s)
            if i >= _WARM_UP:
                seconds.append(thread_time() - began_s)
    finally:
        gc.unfreeze()
    return seconds
