"""Clocks: CPU time, which other processes do not change, and events and graphs on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

Work = Callable[[], object]


class Clock(Protocol):
    name: str

    def seconds_of(self, contestants: Mapping[str, Work], rounds: int) -> dict[str, float]:
        """Median seconds of a call of each, measured in turn so that all see the same load."""
        ...


class CpuClock:
    """CPU time of this thread: other processes' work on the same core does not count."""

    name = "CPU time of one thread"

    def __init__(self, wanted_s: float = 0.002) -> None:
        """wanted_s: the least duration of a reading."""
        self._wanted_s = wanted_s

    def seconds_of(self, contestants: Mapping[str, Work], rounds: int) -> dict[str, float]:
        calls = {name: self._calls_in(work) for name, work in contestants.items()}
        readings: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, work in contestants.items():
                readings[name].append(self._read(work, calls[name]))
        return {name: statistics.median(found) for name, found in readings.items()}

    def _read(self, work: Work, calls: int) -> float:
        begin = time.thread_time()
        for _ in range(calls):
            work()
        return (time.thread_time() - begin) / calls

    def _calls_in(self, work: Work) -> int:
        work()
        return max(1, int(self._wanted_s / max(1e-7, self._read(work, 1))))


class CudaClock:
    """Time between events on the device, of graphs: without launching from Python, as in an engine."""

    name = "time on the device, replayed from a graph"

    def seconds_of(self, contestants: Mapping[str, Work], rounds: int) -> dict[str, float]:
        graphs = {name: _captured(work) for name, work in contestants.items()}
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
        for _ in range(rounds):
            for name, graph in graphs.items():
                begin, end = _event(), _event()
                begin.record()
                graph.replay()
                end.record()
                events[name].append((begin, end))
        torch.cuda.synchronize()
        found = {
            name: statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in pairs)
            for name, pairs in events.items()
        }
        del graphs
        return found


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _captured(work: Work) -> torch.cuda.CUDAGraph:
    """The work as a graph. It runs outside of one first, which compiles kernels and loads libraries."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    return graph
