"""The command ``moonpool bench regions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import click

from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.turns import percentiles
from moonpool.bench.regions import cells as in_cells
from moonpool.bench.regions import router_cost
from moonpool.bench.regions.cells import CellSettings
from moonpool.bench.regions.days import NEAREST, ROUTINGS, Days, Nearest
from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.reports.conditions import CacheState, Conditions, ModelFacts
from moonpool.runtime.reports.report import Curve, Row
from moonpool.simulator.inputs import arguments
from moonpool.simulator.inputs.hardware import Hardware
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.workload import Workload
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

REGIONS = ("eu", "us", "ap")
_LINKS = (
    "eu:us rtt_ms=80 gbit_s=10 price_gb=0.02",
    "us:ap rtt_ms=140 gbit_s=10 price_gb=0.08",
    "eu:ap rtt_ms=180 gbit_s=10 price_gb=0.08",
)
_BLOCK_TOKENS = 512
_QUICK_DAY_S = 60.0


@dataclass(frozen=True)
class Settings:
    days: Days
    workload: Workload
    scenario: Scenario  # with one node a region
    counts: Sequence[int]  # of nodes a region
    target: float
    cells: CellSettings


def _simulated(run: Run, settings: Settings) -> Iterator[Row]:
    kept: dict[str, list[tuple[float, float]]] = {}
    paid: dict[str, list[tuple[float, float]]] = {}
    for routing in ROUTINGS:
        requests, fewest = settings.days.requests(routing, settings.workload), 0
        for count in settings.counts:
            case = f"{routing}, {count} nodes a region"
            run.say(case)
            outcome = Simulation(_scenario(settings, routing, count), requests).run()
            yield from _rows(case, outcome, settings.scenario.node_price)
            kept.setdefault(routing, []).append((count, outcome.effective_ratio))
            paid.setdefault(routing, []).append((count, _cost(outcome, settings.scenario.node_price)))
            if not fewest and outcome.effective_ratio >= settings.target:
                fewest = count
                yield Row(routing, f"fewest nodes a region for {settings.target:.0%}", count, "nodes")
    for panel, unit, lines in (
        ("within the SLOs", "fraction of requests", kept),
        ("cost", "money for 1,000 requests", paid),
    ):
        run.curves += (Curve(panel, name, "nodes a region", unit, points) for name, points in lines.items())


def _scenario(settings: Settings, routing: str, count: int) -> Scenario:
    chooser = Nearest() if routing == NEAREST else None
    return replace(settings.scenario, num_both=count * len(REGIONS), chooser=chooser)


def _rows(case: str, outcome: Outcome, node_price: float) -> Iterator[Row]:
    ttfts = [one.ttft_s for one in outcome.completed]
    found = percentiles(ttfts)
    yield Row(case, "requests within the SLOs", outcome.effective_ratio, "fraction")
    yield Row(case, "TTFT, the way to the user included", found["p50"], "s", **found)
    yield Row(case, "prompt tokens from caches", outcome.hit_ratio, "fraction")
    yield Row(case, "cost of 1,000 requests", _cost(outcome, node_price), "money")
    yield Row(case, "of that, bytes between regions", 1e3 * outcome.egress / len(outcome.served), "money")


def _cost(outcome: Outcome, node_price: float) -> float:
    return 1e3 * (outcome.node_s * node_price + outcome.egress) / len(outcome.served)


_POSITIVE = click.FloatRange(min=0, min_open=True)
_CELLS = ("cells", "decision", "memory", "http")


@benchmark(
    {
        "simulated": _simulated,
        "cells": lambda run, settings: in_cells.simulated(run, settings.cells),
        "decision": lambda run, settings: router_cost.decision_rows(run, settings.cells),
        "memory": lambda run, settings: router_cost.memory_rows(run, settings.cells),
        "http": lambda run, settings: router_cost.http_rows(run, settings.cells),
    },
    packages=("numpy", "aiohttp", "xxhash"),
    rounds=None,
    default=("simulated",),
)
@click.option("--cells", is_flag=True, help=f"Cells and their router instead: {', '.join(_CELLS)}.")
@click.option(
    "--sample", default=1000, type=click.IntRange(min=1), help="One conversation in so many is simulated."
)
@click.option("--hardware", default="8xa800-llama3-70b", metavar="NAME|FILE")
@click.option("--nodes", default="1,2,3", metavar="COUNTS", help="A region's, each tried.")
@click.option("--day", "day_s", default=1800.0, type=_POSITIVE, metavar="SECONDS", help="Length of a day.")
@click.option("--rate", default=0.5, type=_POSITIVE, help="Sessions a second of a region, on average.")
@click.option("--swing", default=0.8, type=click.FloatRange(0, 1), help="Of the rate.")
@click.option("--node-price", default=0.0044, help="Of a second of a node: model.price.")
@click.option(
    "--link",
    "links",
    multiple=True,
    default=_LINKS,
    metavar="LINK",
    help="Between eu, us and ap, as in conductor.region_links.",
)
@click.option("--slo-ttft", "ttft_s", default=2.0, metavar="SECONDS")
@click.option("--slo-tbt", "tbt_s", default=0.1, metavar="SECONDS")
@click.option("--target", default=0.95, type=click.FloatRange(0, 1))
@click.option("--seed", default=1)
def regions(
    run: Run,
    *,
    cells: bool,
    sample: int,
    hardware: str,
    nodes: str,
    day_s: float,
    rate: float,
    swing: float,
    node_price: float,
    links: tuple[str, ...],
    ttft_s: float,
    tbt_s: float,
    target: float,
    seed: int,
) -> Settings:
    """Serve three regions, eight hours from each other, with as many nodes in each, in virtual time.

    isolated: each region serves its own users. nearest: the nearest region with a node that keeps the TTFT
    SLO. follow-the-sun: what exceeds a region's average goes where it is night, by the clock. cost-aware:
    the conductor's policy goodput, which weighs prefix, distance, price and free capacity.

    --cells: 100 cells of 1,000 nodes under 10^6 requests a second, by the router's own code, and what the
    router costs.
    """
    if cells and not run.named:
        run.parts = list(_CELLS)
    counts = [int(text) for text in nodes.split(",") if text.strip().isdigit() and int(text) > 0]
    if len(counts) != len(nodes.split(",")):
        raise click.BadParameter(f"{nodes!r} is not like 1,2,3", param_hint="--nodes")
    if run.quick:
        day_s, counts = _QUICK_DAY_S, counts[:1]
    found: Hardware = arguments.hardware(hardware, {})
    many = CellSettings(sample=sample, seed=seed)
    if run.quick:
        many = CellSettings(num_cells=10, rate=1e5, sample=sample, warm_s=10.0, measured_s=20.0, after_s=20.0)
    in_time = set(run.parts) <= {"simulated"}
    if in_time:
        run.machine = f"simulated {found.name}"
    run.conditions = Conditions(
        [ModelFacts.simulated(found.name)] if in_time else (),
        CacheState.holding(0, 0, "every run starts without blocks"),
        "nothing: the whole day counts" if in_time else f"{many.warm_s:g} s of simulated requests",
        {"workload": seed},
    )
    scenario = Scenario(
        found,
        num_prefill=0,
        num_decode=0,
        num_both=len(REGIONS),
        slo=Slo(ttft_s, tbt_s),
        block_tokens=_BLOCK_TOKENS,
        regions=REGIONS,
        region_links=links,
        node_price=node_price,
        seed=seed,
    )
    workload = Workload(block_tokens=_BLOCK_TOKENS, seed=seed)
    return Settings(Days(REGIONS, day_s, rate, swing), workload, scenario, sorted(counts), target, many)
