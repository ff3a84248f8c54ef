"""The command ``moonpool bench kernels``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import click
import torch
from rich.console import Console

from moonpool.bench.kernels import cases as sweep
from moonpool.bench.kernels import expert_layer as mixture
from moonpool.bench.kernels import kv_writes as moves
from moonpool.bench.kernels import matmuls as products
from moonpool.bench.kernels.device_limits import Machine
from moonpool.kernels import backend_report
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Report, Row

_PATH = click.Path(path_type=Path)
_PACKAGES = ("torch", "numpy", "triton", "flashinfer-python", "flash-attn")
LIMITS_CASE = "limits of this machine"
Part = Callable[[Machine, bool, bool], Iterator[Row]]


def _plain(rows: Callable[[Machine, bool], Iterator[Row]]) -> Part:
    return lambda machine, quick, _full: rows(machine, quick)


PARTS: dict[str, Part] = {
    "step": _plain(sweep.step_rows),
    "linear": _plain(products.linear_rows),
    "decode": sweep.decode_rows,
    "prefill": sweep.prefill_rows,
    "write": _plain(moves.write_rows),
    "merge": _plain(moves.merge_rows),
    "experts": _plain(products.expert_rows),
    "mixture": _plain(mixture.mixture_rows),
    "lora": _plain(products.lora_rows),
}


@click.command()
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(tuple(PARTS)), help="Repeatable; default: all."
)
@click.option("--device", type=click.Choice(("auto", "cpu", "cuda")), default="auto", show_default=True)
@click.option("--rounds", default=9, show_default=True, help="Readings of each contestant, in turn.")
@click.option("--quick", is_flag=True, help="A few cases only.")
@click.option("--full", is_flag=True, help="On a GPU: every batch and context for every shape (an hour).")
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
def kernels(
    parts: tuple[str, ...], device: str, rounds: int, quick: bool, full: bool, json_path: Path | None
) -> None:
    """Measure the kernels beside torch's own and others', and beside what the machine gives at the plainest.

    On a CPU with one thread; on a GPU replayed from graphs, over more memory than its cache holds.
    """
    torch.set_num_threads(1)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch sees no CUDA device here", param_hint="--device")
    console = Console(stderr=True, highlight=False)
    machine = Machine.of(torch.device(device), rounds)
    cpu = backend_report()["cpu"]
    form = "Triton" if machine.is_cuda else f"{cpu['form']} ({cpu['reason']})"
    console.print(f"kernels: {form}; medians of {rounds}, {machine.clock.name}")
    rows = limit_rows(machine)
    for part in parts or PARTS:
        for row in PARTS[part](machine, quick, full):
            rows.append(row)
            console.print(f"  {row.case}: {row.metric} {report.number(row.value)} {row.unit}", style="dim")
            if json_path is not None and machine.is_cuda:
                # What has been measured is kept should the machine be taken away.
                report.write(_report(machine, rows), json_path)
    found = _report(machine, rows)
    if json_path is not None:
        report.write(found, json_path)
    report.show(found)


def limit_rows(machine: Machine) -> list[Row]:
    units = {"copy": (1e9, "GB/s"), "read": (1e9, "GB/s"), "matmul": (1e12, "TFLOP/s")}
    return [
        Row(LIMITS_CASE, f"large {name}", machine.limits[name] / scale, unit)
        for name, (scale, unit) in units.items()
    ]


def _report(machine: Machine, rows: list[Row]) -> Report:
    environment = report.measure_environment(_PACKAGES)
    if machine.is_cuda:
        facts = torch.cuda.get_device_properties(machine.device)
        gpu = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        environment = replace(environment, machine=f"{gpu}; {environment.machine}")
    return Report(environment, rows)
