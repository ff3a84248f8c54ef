"""The command ``moonpool bench elastic``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from moonpool.bench.elastic.comparison import Comparison, Fleet
from moonpool.bench.harness.command import Run, benchmark
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.plan import Bounds
from moonpool.runtime.reports.report import Row
from moonpool.simulator.inputs import arguments
from moonpool.simulator.inputs.azure_trace import load_azure_trace, times
from moonpool.simulator.inputs.hardware import A800, LLAMA3_70B, tensor_parallel
from moonpool.simulator.inputs.trace import BLOCK_TOKENS, TraceRequest

_QUICK_REQUESTS = 600


@dataclass(frozen=True)
class Settings:
    requests: list[TraceRequest]
    comparison: Comparison


def _simulated(run: Run, settings: Settings) -> Iterator[Row]:
    yield from settings.comparison.rows(run.say)
    run.curves += settings.comparison.curves()


@benchmark({"simulated": _simulated}, packages=("numpy",), rounds=None)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="An Azure LLM inference trace (CSV): arrivals and lengths.",
)
@click.option(
    "--hardware",
    default="",
    metavar="NAME|FILE",
    help="The nodes, as for `bench simulate`; default: 4 A800 with LLaMA3-70B.",
)
@click.option(
    "--times",
    "copies",
    default=8,
    show_default=True,
    type=click.IntRange(min=1),
    help="Copies of each request, some seconds apart.",
)
@click.option(
    "--join",
    "join_s",
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Until a node asked for serves: 10 where the weights are in its host's memory, 60 from a disk.",
)
@click.option("--slo-ttft", default=30.0, show_default=True, metavar="SECONDS")
@click.option("--slo-tbt", default=0.1, show_default=True, metavar="SECONDS")
@click.option("--prefill", default="14:62", show_default=True, metavar="LEAST:MOST", help="Prefill nodes.")
@click.option("--decode", default="2:16", show_default=True, metavar="LEAST:MOST", help="Decode nodes.")
@click.option("--spare", default=1, show_default=True, help="Nodes of each role for the loss of one.")
@click.option("--hold", "hold_s", default=60.0, show_default=True, metavar="SECONDS", help="planner.hold_s")
def elastic(
    run: Run,
    *,
    trace: Path,
    hardware: str,
    copies: int,
    join_s: float,
    slo_ttft: float,
    slo_tbt: float,
    prefill: str,
    decode: str,
    spare: int,
    hold_s: float,
) -> Settings:
    """Compare a planned number of nodes with fixed ones, on a trace, in virtual time.

    Fixed fleets: one with as many node-hours as the planned one used, and the smallest that keeps the SLOs as
    often. The planner, placement and estimates are the conductor's own code.
    """
    requests = load_azure_trace(trace)
    if run.quick:
        requests = requests[:_QUICK_REQUESTS]
    requests = times(requests, copies, block_tokens=BLOCK_TOKENS)
    nodes = arguments.hardware(hardware, {}) if hardware else tensor_parallel(A800, LLAMA3_70B, 4)
    run.machine = f"simulated {nodes.name}, {copies} times the trace"
    fleet = Fleet(
        hardware=nodes,
        slo=Slo(slo_ttft, slo_tbt),
        bounds={"prefill": _bounds("prefill", prefill, spare), "decode": _bounds("decode", decode, spare)},
        join_s=join_s,
        hold_s=hold_s,
    )
    return Settings(requests, Comparison(fleet, requests))


def _bounds(role: str, text: str, spare: int) -> Bounds:
    least, colon, most = text.partition(":")
    if not (colon and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise click.BadParameter(f"{text!r} is not like 2:16", param_hint=f"--{role}")
    return Bounds(int(least), int(most), spare)
