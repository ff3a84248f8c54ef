"""GB/s against block size, one line for each path: a picture of a report."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from moonpool.bench.transfer.batch_shape import size_name, size_of
from moonpool.runtime.reports.report import Report


def draw(report: Report, path: Path) -> None:
    """Write a PNG. Needs matplotlib; ClickException says so where it is missing."""
    try:
        import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for row in report.rows:
        transport, *shape = row.case.split("/")
        if row.metric != "bandwidth" or len(shape) != 4 or shape[3] != "checksum-off":
            continue
        block = size_of(shape[0])
        for name, value in ((f"{transport} {shape[2]}", row.value), (row.peer or "", row.peer_value)):
            if value is not None:
                # Of several batch sizes the best one: what the path can do at this block size.
                lines[name][block] = max(value, lines[name].get(block, 0.0))
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, points in sorted(lines.items()):
        blocks = sorted(points)
        # Ours are solid.
        style: dict[str, Any] = {} if name.endswith((" read", " write")) else {"linestyle": "--"}
        axes.plot(blocks, [points[block] for block in blocks], marker="o", label=name, **style)
    axes.set_xscale("log", base=2)
    ticks = sorted({block for points in lines.values() for block in points})
    axes.set_xticks(ticks, [size_name(tick) for tick in ticks])
    axes.set_xlabel("block size")
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"{report.environment.machine}; commit {report.environment.commit}", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
