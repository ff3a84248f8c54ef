"""The device, its limits at the plainest work, and its clock: CPU time, or events and graphs on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

Work = Callable[[], object]
BFLOAT16_MATMUL = "matmul in bfloat16"


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


@dataclass
class Machine:
    """``limits``: ``copy`` and ``read`` in bytes/s (a copy counts what it reads and what it writes),
    ``matmul`` in FLOP/s, each measured in this run. On a CPU ``matmul`` is in float32, and
    ``BFLOAT16_MATMUL`` the faster of bfloat16 and float32: without instructions for bfloat16 torch's products
    in it are several times slower."""

    device: torch.device
    clock: Clock
    rounds: int
    dtype: torch.dtype  # of activations
    limits: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device, rounds: int) -> Machine:
        cuda = device.type == "cuda"
        clock, dtype = (CudaClock(), torch.bfloat16) if cuda else (CpuClock(), torch.float32)
        found = cls(device, clock, rounds, dtype)
        found.limits = found._measured_limits()
        return found

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def cold_nbytes(self) -> int:
        """More bytes than the caches hold: work is rotated over them."""
        if not self.is_cuda:
            return 64 << 20
        return max(256 << 20, 4 * int(torch.cuda.get_device_properties(self.device).L2_cache_size))

    @property
    def free_nbytes(self) -> int:
        """Memory that a case may use."""
        if not self.is_cuda:
            return 2 << 30
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0] * 0.85)

    def _measured_limits(self) -> dict[str, float]:
        size = 4 * self.cold_nbytes
        source = torch.zeros(size // 4, device=self.device)
        target = torch.empty_like(source)
        side = 8192 if self.is_cuda else 1024
        a, b = torch.randn(2, side, side, device=self.device).to(self.dtype).unbind(0)
        out = torch.empty_like(a)
        works: dict[str, Work] = {
            "copy": lambda: target.copy_(source),
            "read": source.sum,
            "matmul": lambda: torch.mm(a, b, out=out),
        }
        if not self.is_cuda:
            narrow = a.bfloat16(), b.bfloat16()
            works[BFLOAT16_MATMUL] = lambda: F.linear(*narrow)
        seconds = self.clock.seconds_of(works, self.rounds)
        limits = {
            "copy": 2 * source.nbytes / seconds["copy"],
            "read": source.nbytes / seconds["read"],
            "matmul": 2 * side**3 / seconds["matmul"],
        }
        if not self.is_cuda:
            limits[BFLOAT16_MATMUL] = max(limits["matmul"], 2 * side**3 / seconds[BFLOAT16_MATMUL])
        return limits


def name_of(dtype: torch.dtype) -> str:
    return {torch.float8_e4m3fn: "fp8"}.get(dtype, str(dtype).removeprefix("torch."))
