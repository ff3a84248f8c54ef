"""The command ``moonpool bench kernels``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click
import torch

from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.kernels.attention import decode_rows, prefill_rows
from moonpool.bench.kernels.device_limits import Machine
from moonpool.bench.kernels.experts import mixture_rows
from moonpool.bench.kernels.kv_writes import merge_rows, write_rows
from moonpool.bench.kernels.matmuls import linear_rows, lora_rows, quantised_rows
from moonpool.kernels.report import backend_report
from moonpool.runtime.reports.conditions import NO_CACHE, Conditions
from moonpool.runtime.reports.report import Row

_LIMITS = "limits of this machine"


def _limit_rows(run: Run, machine: Machine) -> Iterator[Row]:
    for name, limit in machine.limits.items():
        unit, scale = ("TFLOP/s", 1e12) if "matmul" in name else ("GB/s", 1e9)
        yield Row(_LIMITS, f"large {name}", limit / scale, unit)


def _part(
    rows: Callable[[Machine, bool], Iterator[Row]],
) -> Callable[[Run, Machine], Iterator[Row]]:
    return lambda run, machine: rows(machine, run.quick)


PARTS = {
    "linear": linear_rows,
    "quantised": quantised_rows,
    "decode": decode_rows,
    "prefill": prefill_rows,
    "write": write_rows,
    "merge": merge_rows,
    "mixture": mixture_rows,
    "lora": lora_rows,
}


@benchmark(
    {"limits": _limit_rows, **{name: _part(rows) for name, rows in PARTS.items()}},
    packages=("torch", "numpy", "triton", "flashinfer-python"),
    rounds=9,
)
@click.option("--device", type=click.Choice(("auto", "cpu", "cuda")), default="auto")
def kernels(run: Run, device: str) -> Machine:
    """Measure the kernels beside torch's own and others', and beside the machine's limits.

    On a CPU with one thread; on a GPU replayed from graphs, over more memory than its cache holds.
    """
    torch.set_num_threads(1)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch sees no CUDA device here", param_hint="--device")
    machine = Machine.of(torch.device(device), run.rounds)
    cpu = backend_report()["cpu"]
    form = "Triton" if machine.is_cuda else f"{cpu['form']} ({cpu['reason']})"
    run.say(f"kernels: {form}; medians of {run.rounds}, {machine.clock.name}")
    if machine.is_cuda:
        facts = torch.cuda.get_device_properties(machine.device)
        run.machine = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    run.conditions = Conditions(
        [],  # operators of the shapes and dtypes that the cases name
        NO_CACHE,
        "a round of each that does not count",
        {},
    )
    if "limits" not in run.parts:
        run.parts.insert(0, "limits")
    return machine
