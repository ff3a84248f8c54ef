"""Measure in turn: every contestant once a round, so that all see the same state of the machine."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TypedDict, TypeVar

import numpy as np

from moonpool.runtime.reports.report import Row, versus

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Sample = float | Sequence[float] | None
Call = Callable[[], Sample | Awaitable[Sample]]
_MAX_SAMPLES = 64


async def turns(
    contestants: Mapping[K, Call],
    rounds: int,
    *,
    warm_up: int = 1,
    rotate: int = 0,
    before: Callable[[int], object] = lambda number: None,
) -> dict[K, list[float]]:
    """The samples of each contestant, without those of the ``warm_up`` rounds.

    A call returns one or several samples, or None: then the seconds that it took are the sample.
    rotate: how many contestants the start moves on each round. before: called first in each round, with its
    number, negative for those that do not count.
    """
    found: dict[K, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for number in range(-warm_up, rounds):
        before(number)
        for name in order:
            began_s = time.perf_counter()
            result = contestants[name]()
            value = await result if inspect.isawaitable(result) else result
            if value is None:
                value = time.perf_counter() - began_s
            if number >= 0:
                found[name] += [value] if isinstance(value, float | int) else value
        order = order[rotate:] + order[:rotate]
    return found


async def repeat(call: Callable[[], object], seconds: float) -> list[float]:
    """Call for ``seconds``, at least once, after one call that does not count: the seconds of each, as the
    call returns them in a float or else as it takes.

    The caches hold the previous contestant's data at first.
    """
    taken: list[float] = []
    until = time.perf_counter() + seconds
    first = True
    while first or not taken or time.perf_counter() < until:
        began_s = time.perf_counter()
        result = call()
        value = await result if inspect.isawaitable(result) else result
        took_s = value if isinstance(value, float) else time.perf_counter() - began_s
        if first:
            first, until = False, time.perf_counter() + seconds
        else:
            taken.append(took_s)
    return taken


async def each(items: Iterable[T], at_once: int, work: Callable[[T], Awaitable[object]]) -> None:
    """Call ``work`` with each item, ``at_once`` at a time; the first error ends the others."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear between the two nearest. ``values`` must not be empty."""
    return float(np.quantile(values, fraction))


class Percentiles(TypedDict):
    """Fields of a row."""

    p50: float
    p90: float
    p95: float
    p99: float


def percentiles(values: Sequence[float], scale: float = 1.0) -> Percentiles:
    """Those of ``values`` times ``scale``. ``values`` must not be empty."""
    p50, p90, p95, p99 = (scale * quantile(values, fraction) for fraction in (0.5, 0.9, 0.95, 0.99))
    return {"p50": p50, "p90": p90, "p95": p95, "p99": p99}


def condensed(values: Sequence[float]) -> list[float]:
    """``values`` in their order; of more than 64, the medians of 64 groups of neighbours.

    Neighbours see the same state of the machine, so they tell less than as many independent samples.
    """
    if len(values) <= _MAX_SAMPLES:
        return list(values)
    bounds = [len(values) * i // _MAX_SAMPLES for i in range(_MAX_SAMPLES + 1)]
    return [median(values[begin:end]) for begin, end in pairwise(bounds)]


def spread(case: str, metric: str, values: Sequence[float], unit: str, scale: float = 1.0) -> Row:
    """A row of the median of ``values`` times ``scale``, with percentiles and samples."""
    found = percentiles(values, scale)
    samples = condensed([scale * value for value in values])
    return Row(case, metric, found["p50"], unit, samples=samples, **found)


def compared(
    case: str, metric: str, unit: str, samples: Mapping[str, Sequence[float]], of: Callable[[float], float]
) -> list[Row]:
    """A row of the first contestant's median beside each other's; ``of`` makes a figure of a median.

    Alone, it gets one row without a peer.
    """
    figures = {name: of(median(values)) for name, values in samples.items()}
    (_, ours), *others = figures.items()
    own = condensed([of(value) for value in next(iter(samples.values()))])
    row = Row(case, metric, ours, unit, samples=own)
    return [versus(row, name, value) for name, value in others] or [row]


def gaps(times_s: Sequence[float]) -> list[float]:
    """Seconds between neighbours."""
    return [later - earlier for earlier, later in pairwise(times_s)]
