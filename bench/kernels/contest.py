"""One case: our kernel, others' on the same work, the limit of the machine, and the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moonpool.bench.kernels import goals
from moonpool.bench.kernels.clock import Work
from moonpool.bench.kernels.device_limits import Machine
from moonpool.runtime.reports.report import Row, versus

# Largest error allowed, relative to the largest value expected.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
OURS = "ours"


@dataclass
class Contest:
    """``calls``: operations in a call of ours or of a peer's work; ``amount``: bytes or FLOP of an operation,
    by what ``limit`` (``copy``, ``read`` or ``matmul``) measures. ``error``: gives (found, expected)."""

    case: str
    ours: Work
    calls: int
    amount: float
    limit: str
    dtype: torch.dtype
    error: Callable[[], tuple[Tensor, Tensor]]
    peers: Mapping[str, Work] = field(default_factory=dict)
    goal: float | None = None  # share of the limit
    peer_goals: Mapping[str, float] = field(default_factory=dict)  # our rate over the peer's

    def rows(self, machine: Machine) -> Iterator[Row]:
        seconds = machine.clock.seconds_of({OURS: self.ours, **self.peers}, machine.rounds)
        scale, unit = (1e12, "TFLOP/s") if self.limit == "matmul" and machine.is_cuda else (1e9, "GB/s")
        if self.limit == "matmul" and not machine.is_cuda:
            unit = "GFLOP/s"
        rates = {name: self.amount * self.calls / found / scale for name, found in seconds.items()}
        yield Row(self.case, "time", seconds[OURS] / self.calls * 1e6, "µs")
        limited = Row(self.case, "rate", rates[OURS], unit, **goals.at_least(self.goal))
        yield versus(limited, f"large {self.limit}", machine.limits[self.limit] / scale)
        for name in self.peers:
            against = Row(self.case, "rate", rates[OURS], unit, **goals.at_least(self.peer_goals.get(name)))
            yield versus(against, name, rates[name])
        found, expected = self.error()
        expected = expected.double()
        largest = max(1.0, float(expected.abs().max()))
        off = float((found.double() - expected).abs().max()) / largest
        bound = TOLERANCE[self.dtype]
        yield Row(self.case, "error", off, "of the largest", limit="at most", limit_value=bound)


def not_measured(case: str, why: str, needed: float, unit: str) -> Row:
    """The row of a case that could not be measured, with the reason and the figure behind it."""
    return Row(case, f"not measured: {why}", needed, unit)
