"""Timing contestants in turn on a machine that others use too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Work = Callable[[], object]


def seconds_of(contestants: Mapping[str, Work], rounds: int, wanted_s: float = 0.002) -> dict[str, float]:
    """Median seconds of CPU a call of each, measured in turn so that all see the same weather.

    CPU time of this thread, since others' work on the same core is none of ours; a reading lasts ``wanted_s``
    or longer.
    """
    calls = {name: _calls_in(work, wanted_s) for name, work in contestants.items()}
    readings: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            readings[name].append(_read(work, calls[name]))
    return {name: statistics.median(found) for name, found in readings.items()}


def _read(work: Work, calls: int) -> float:
    begin = time.thread_time()
    for _ in range(calls):
        work()
    return (time.thread_time() - begin) / calls


def _calls_in(work: Work, wanted_s: float) -> int:
    work()
    return max(1, int(wanted_s / max(1e-7, _read(work, 1))))
