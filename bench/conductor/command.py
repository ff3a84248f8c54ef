"""The command ``moonpool bench conductor``."""

from __future__ import annotations

from functools import partial

import click

from moonpool.bench.conductor.dashboard import dashboard_rows
from moonpool.bench.conductor.decisions import Settings, scale_rows
from moonpool.bench.conductor.growth import growth_rows
from moonpool.bench.conductor.matching import matching_rows
from moonpool.bench.conductor.overhead import booking_rows, http_rows, sse_rows, worker_rows
from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.peers import python_of
from moonpool.conductor.placing.policies import POLICIES
from moonpool.runtime.reports.conditions import NONE, CacheState, Conditions

_OWN = ("scale", "http", "booking", "sse", "workers", "dashboard")


@benchmark(
    {
        "scale": scale_rows,
        "http": http_rows,
        "booking": booking_rows,
        "sse": sse_rows,
        "workers": worker_rows,
        "growth": growth_rows,
        "dashboard": dashboard_rows,
        "matching": matching_rows,
    },
    packages=("numpy", "uvloop", "aiohttp", "grpcio"),
    peers={"dynamo": partial(python_of, "dynamo")},
    default=_OWN,
)
@click.option("--policy", type=click.Choice(sorted(POLICIES)), default="goodput")
@click.option("--decisions", default=3000, type=click.IntRange(min=1), help="Measured for each size.")
@click.option("--requests", default=1600, type=click.IntRange(min=1), help="Measured over HTTP.")
@click.option("--full", is_flag=True, help="More sizes: ten million blocks, 1,024 nodes on the dashboard.")
def conductor(run: Run, policy: str, decisions: int, requests: int, full: bool) -> Settings:
    """Measure decisions in clusters of many sizes, and the conductor's cost of a request.

    growth: cost with more blocks, nodes and streams, and memory over 100,000 requests.

    dashboard: what a viewer costs, and a frame in Chromium, with 64 nodes and, --full, 1,024.
    matching: prefix matching alone, beside Dynamo's with --peer dynamo.
    """
    if "dynamo" in run.peers and "matching" not in run.parts:
        run.parts.append("matching")
    if run.quick:
        decisions, requests = min(decisions, 300), min(requests, 64)
    run.conditions = Conditions(
        [],  # nodes of http, booking, sse, workers and dashboard only wait
        CacheState(NONE, note="scale, matching: an index of as many blocks as the case says"),
        "scale: some requests; http, sse: two for each that runs at a time; booking: eight; else nothing",
        {"index and prompts": 0},
    )
    return Settings(policy, decisions, requests, full)
