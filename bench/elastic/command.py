"""The command ``moonpool bench elastic``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import click

from moonpool.bench.elastic.comparison import Case, Comparison
from moonpool.bench.elastic.fleets import Planned, Simulator, Task
from moonpool.bench.elastic.live import LiveLoad, live_rows
from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.shapes import models_of
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.plan import Bounds
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.reports.conditions import CacheState, Conditions, ModelFacts
from moonpool.runtime.reports.report import Row
from moonpool.simulator.inputs import arguments
from moonpool.simulator.inputs.azure_trace import load_azure_trace, times
from moonpool.simulator.inputs.hardware import A800, LLAMA3_70B, tensor_parallel
from moonpool.simulator.inputs.trace import TraceRequest

_QUICK_REQUESTS, _QUICK_S = 600, 10.0


@dataclass(frozen=True)
class Settings:
    """``trace``: as it is; ``requests``: so many times, for the simulator."""

    trace: list[TraceRequest]
    requests: list[TraceRequest]
    cases: list[Case]
    most: dict[str, Bounds]
    live: LiveLoad


def _simulated(run: Run, settings: Settings) -> Iterator[Row]:
    with Simulator(settings.requests) as simulator:
        comparison = Comparison(simulator, settings.cases, settings.most, run.say)
        yield from comparison.rows()
    run.curves += comparison.curves()


@benchmark(
    {"simulated": _simulated, "live": lambda run, given: live_rows(run, given.trace, given.live)},
    packages=("numpy", "torch", "aiohttp", "grpcio", "redis"),
    rounds=None,
    default=("simulated",),
)
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
    type=click.IntRange(min=1),
    help="Copies of each request, some seconds apart.",
)
@click.option(
    "--join",
    "join_s",
    default=10.0,
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Until a node asked for serves: 10 where the weights are in its host's memory, 60 from a disk.",
)
@click.option("--slo-ttft", "ttfts", multiple=True, default=(30.0,), metavar="SECONDS", type=float)
@click.option("--slo-tbt", default=0.1, metavar="SECONDS")
@click.option("--prefill", default="4:62", metavar="LEAST:MOST", help="Prefill nodes.")
@click.option("--decode", default="1:16", metavar="LEAST:MOST", help="Decode nodes.")
@click.option("--spare", default=0, show_default=True, help="planner.spare; fixed fleets have none either.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=(0.95,),
    metavar="FRACTION",
    type=float,
    help="planner.attained. Repeatable, as --slo-ttft and --hold: each combination is a planned fleet.",
)
@click.option(
    "--hold", "holds", multiple=True, default=(30.0,), metavar="SECONDS", type=float, help="planner.hold_s."
)
@click.option("--migrate", default="drain,queue", metavar="NAMES", help="conductor.migrate, of all.")
def elastic(
    run: Run,
    *,
    trace: Path,
    hardware: str,
    copies: int,
    join_s: float,
    ttfts: tuple[float, ...],
    slo_tbt: float,
    prefill: str,
    decode: str,
    spare: int,
    targets: tuple[float, ...],
    holds: tuple[float, ...],
    migrate: str,
) -> Settings:
    """Compare a planned number of nodes with fixed ones, on a trace.

    simulated: planned fleets in virtual time, each with a fixed one of as many node-hours and the smallest
    one that keeps the SLOs as often. live: the busiest three minutes on clusters on this machine, with a
    quarter of the tokens. The planner, placement and estimates are the conductor's own code.
    """
    requests = load_azure_trace(trace)
    if run.quick:
        requests = requests[:_QUICK_REQUESTS]
    nodes = arguments.hardware(hardware, {}) if hardware else tensor_parallel(A800, LLAMA3_70B, 4)
    if "simulated" in run.parts:
        run.machine = f"simulated {nodes.name}, {copies} times the trace"
    bounds = {"prefill": _bounds("prefill", prefill, spare), "decode": _bounds("decode", decode, spare)}
    # As a conductor checks them.
    for target, hold_s in product(targets, holds):
        sets = [f"planner.attained={target}", f"planner.hold_s={hold_s}", f"planner.spare={spare}"]
        causes = load_config(None, [*sets, f"conductor.migrate={migrate}"]).conductor.migrate
    least = bounds["prefill"].least, bounds["decode"].least
    cases = [
        Case(Task(nodes, Slo(ttft_s, slo_tbt), *least, migrate=causes, planned=planned), planned)
        for ttft_s, target, hold_s in product(ttfts, targets, holds)
        for planned in [Planned(bounds, target, hold_s, join_s)]
    ]
    live = LiveLoad(window_s=_QUICK_S) if run.quick else LiveLoad()
    run.conditions = Conditions(
        [
            *([ModelFacts.simulated(nodes.name)] if "simulated" in run.parts else []),
            *(models_of(()) if "live" in run.parts else []),
        ],
        CacheState.holding(0, 0, "every fleet starts without blocks"),
        "nothing: the whole trace counts",
        {"prompts of live": 0},
    )
    return Settings(requests, times(requests, copies), cases, bounds, live)


def _bounds(role: str, text: str, spare: int) -> Bounds:
    least, colon, most = text.partition(":")
    if not (colon and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise click.BadParameter(f"{text!r} is not like 2:16", param_hint=f"--{role}")
    return Bounds(int(least), int(most), spare)
