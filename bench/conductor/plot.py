"""Cost of a decision against the number of nodes: a picture of a report."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

from moonpool.runtime.reports.report import Report

mpl.use("Agg")
from matplotlib import pyplot

_CASE = re.compile(r"([a-z-]+), ([\d,]+) nodes, ([\d,]+) blocks")


def draw(report: Report, path: Path) -> None:
    """Median (line) and 99th percentile (dotted) of each number of blocks, in microseconds."""
    curves: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    policy = ""
    for row in report.rows:
        match = _CASE.match(row.case)
        if match and row.p50 is not None and row.p99 is not None:
            policy = match[1]
            num_nodes, num_blocks = (int(match[i].replace(",", "")) for i in (2, 3))
            curves[num_blocks].append((num_nodes, row.p50, row.p99))
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for num_blocks, points in sorted(curves.items()):
        points.sort()
        nodes, p50s, p99s = zip(*points, strict=True)
        (line,) = axes.loglog(nodes, p50s, "o-", base=2, label=f"{num_blocks:,} blocks, p50")
        axes.loglog(nodes, p99s, "o:", base=2, color=line.get_color(), label="p99")
    axes.set(xlabel="nodes", ylabel="CPU µs a decision", title=f"{policy}: prompts of 128 blocks")
    axes.set_yscale("log", base=10)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
