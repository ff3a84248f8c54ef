"""The command ``moonpool bench eviction``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from moonpool.bench.eviction.policies import CONTENDERS
from moonpool.bench.eviction.replay import GENERATED, Replay, Request, load_trace, optimum, replay
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.reports import report

_PATH = click.Path(path_type=Path)
_CAPACITIES = "1000,10000,30000,50000,100000"


@click.command()
@click.option("--trace", type=_PATH, metavar="FILE", help="JSON lines with hash_ids, gzipped or not.")
@click.option(
    "--generate", type=click.Choice(sorted(GENERATED)), help="Instead of a trace: a load made here, seeded."
)
@click.option("--policies", default=",".join(CONTENDERS), show_default=True, metavar="NAMES")
@click.option("--blocks", default=_CAPACITIES, show_default=True, metavar="COUNTS", help="Capacities.")
@click.option("--seed", default=1, show_default=True, help="With --generate.")
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
@click.option("--plot", "plot_path", type=_PATH, metavar="FILE", help="Draw hit rate against capacity (PNG).")
def eviction(
    trace: Path | None,
    generate: str | None,
    policies: str,
    blocks: str,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Replay a trace through eviction policies, and through the clairvoyant optimum."""
    if (trace is None) == (generate is None):
        raise click.UsageError("give either --trace FILE or --generate NAME")
    names = policies.split(",")
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise click.UsageError(f"no policy {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    try:
        capacities = [int(count) for count in blocks.split(",")]
        requests = GENERATED[generate](random.Random(seed)) if generate else load_trace(trace or Path())
    except ValueError as error:
        raise click.UsageError(f"--blocks must be numbers with commas between: {error}") from error
    except MoonpoolError as error:
        raise click.ClickException(str(error)) from error
    rows = measure(requests, names, capacities, Console(stderr=True, highlight=False))
    result = report.Report(report.measure_environment(()), rows)
    report.show(result)
    if json_path is not None:
        report.write(result, json_path)
    if plot_path is not None:
        _draw(result, plot_path)


def measure(
    requests: Sequence[Request], names: Sequence[str], capacities: Sequence[int], console: Console
) -> list[report.Row]:
    """Hit rates of blocks, and CPU time a block, for each capacity and policy; LRU beside the others."""
    rows: list[report.Row] = []
    for capacity in capacities:
        case = f"{capacity:,} blocks"
        results: dict[str, Replay] = {}
        with console.status(case) as status:
            for name in names:
                status.update(f"{case}: {name}")
                results[name] = replay(requests, name, capacity)
            status.update(f"{case}: optimum")
            best = optimum(requests, capacity)
        for name, result in results.items():
            row = report.Row(case, f"{name} hit rate", result.hit_rate, "of blocks")
            lru = results.get("lru")
            rows.append(
                report.versus(row, "lru", lru.hit_rate) if lru and lru.num_hits and name != "lru" else row
            )
        rows.append(report.Row(case, "clairvoyant hit rate", best, "of blocks"))
        for name, result in results.items():
            rows.append(
                report.Row(case, f"{name} time", result.seconds / result.num_blocks * 1e6, "µs/block")
            )
    return rows


def _draw(result: report.Report, path: Path) -> None:
    try:
        import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[tuple[int, float]]] = {}
    for row in result.rows:
        name, _, metric = row.metric.partition(" ")
        if metric == "hit rate":
            capacity = int(row.case.split()[0].replace(",", ""))
            lines.setdefault(name, []).append((capacity, row.value))
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, points in lines.items():
        style = "--" if name == "clairvoyant" else "-"
        axes.plot(*zip(*sorted(points), strict=True), style, marker="o", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("hit rate of blocks")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
