"""The command ``moonpool bench conductor``."""

from __future__ import annotations

from pathlib import Path

import click
import uvloop
from rich.console import Console

from moonpool.bench.conductor.decisions import FULL, QUICK, scale_rows
from moonpool.bench.conductor.dynamo_peer import dynamo_rows
from moonpool.bench.conductor.overhead import dashboard_rows, http_rows, sse_rows
from moonpool.bench.conductor.plot import draw
from moonpool.conductor.placing.policies import POLICIES
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Report, Row

_PATH = click.Path(path_type=Path)
PARTS = ("scale", "http", "sse", "dashboard")


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Repeatable; default: all.")
@click.option("--policy", type=click.Choice(sorted(POLICIES)), default="goodput", show_default=True)
@click.option("--decisions", default=3000, show_default=True, help="Measured for each size.")
@click.option("--requests", default=1600, show_default=True, help="Measured over HTTP.")
@click.option("--full", is_flag=True, help="More sizes, up to ten million blocks.")
@click.option(
    "--peer", "peers", multiple=True, type=click.Choice(["dynamo"]), help="Compare with its matching."
)
@click.option(
    "--plot", "plot_path", type=_PATH, metavar="FILE", help="Draw cost against nodes there (PNG, SVG)."
)
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
def conductor(
    parts: tuple[str, ...],
    policy: str,
    decisions: int,
    requests: int,
    full: bool,
    peers: tuple[str, ...],
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure decisions in clusters of many sizes, and what the conductor adds to a request."""
    console = Console(stderr=True, highlight=False)
    rows: list[Row] = []
    with console.status("") as status:
        if not parts or "scale" in parts:
            rows += scale_rows(FULL if full else QUICK, policy, decisions, status.update)
        if not parts or "http" in parts:
            status.update("requests over HTTP")
            rows += uvloop.run(http_rows(requests))
        if not parts or "sse" in parts:
            status.update("streams of tokens")
            rows += uvloop.run(sse_rows())
        if not parts or "dashboard" in parts:
            status.update("somebody who looks at the dashboard")
            rows += uvloop.run(dashboard_rows())
        if "dynamo" in peers:
            status.update("prefix matching, ours and Dynamo's")
            rows += dynamo_rows()
    result = Report(report.measure_environment(("numpy", "uvloop", "aiohttp", "grpcio")), rows)
    report.show(result)
    if plot_path is not None:
        draw(result, plot_path)
    if json_path is not None:
        report.write(result, json_path)
