"""One case: our kernel, other kernels on the same work, the limit of the machine, and the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from moonpool.bench.kernels.device_limits import Machine, Work
from moonpool.runtime.reports.report import Row, versus

# The largest error allowed, relative to the largest value expected.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_OURS = "ours"


def contest(
    machine: Machine,
    case: str,
    ours: Work,
    *,
    calls: int,
    amount: float,
    limit: str,
    error: Callable[[], tuple[Tensor, Tensor]],
    dtype: torch.dtype | None = None,
    peers: Mapping[str, Work] | None = None,
) -> Iterator[Row]:
    """Time, rate beside the limit and each peer, and error.

    calls: operations in one call of ``ours`` or of a peer. amount: bytes or FLOP of an operation, by what
    ``limit`` (one of the machine's) measures. error: gives (found, expected).
    """
    seconds = machine.clock.seconds_of({_OURS: ours, **(peers or {})}, machine.rounds)
    scale, unit = 1e9, "GB/s"
    if "matmul" in limit:
        scale, unit = (1e12, "TFLOP/s") if machine.is_cuda else (1e9, "GFLOP/s")
    rates = {name: amount * calls / of / scale for name, of in seconds.items()}
    yield Row(case, "time", seconds[_OURS] / calls * 1e6, "µs")
    row = Row(case, "rate", rates[_OURS], unit)
    yield versus(row, f"large {limit}", machine.limits[limit] / scale)
    for name in peers or {}:
        yield versus(row, name, rates[name])
    yield error_row(case, *error(), dtype or machine.dtype)


def error_row(case: str, found: Tensor, expected: Tensor, dtype: torch.dtype) -> Row:
    """The largest difference, of values computed in ``dtype``."""
    expected = expected.double()
    largest = max(1.0, float(expected.abs().max()))
    off = float((found.double() - expected).abs().max()) / largest
    return Row(case, "error", off, "of the largest", limit="at most", limit_value=_TOLERANCE[dtype])


def not_measured(case: str, why: str, needed: float = 0.0, unit: str = "") -> Row:
    """The row of a case that could not be measured, with the reason and the figure behind it."""
    return Row(case, f"not measured: {why}", needed, unit)
