"""Every figure of a run of ``bench serve`` beside its peers and limits: a picture of a report."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from moonpool.runtime.reports.report import Report, Row, number

mpl.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

_OURS, _PEER, _SPREAD = "tab:blue", "silver", "black"


def draw(report: Report, path: Path) -> None:
    """Write a PNG or SVG, by the file's ending: a panel for each case and unit, a bar for each figure.

    Peers are grey, a thin line goes on to the 99th percentile, a dotted one marks a limit.
    """
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        panels.setdefault((row.case, row.unit), []).append(row)
    bars = {panel: _bars(rows) for panel, rows in panels.items()}
    heights = [1 + len(lines) for lines in bars.values()]
    figure, grid = pyplot.subplots(
        max(len(bars), 1),
        1,
        squeeze=False,
        figsize=(9, 0.6 + 0.3 * sum(heights)),
        height_ratios=heights or None,
        layout="constrained",
    )
    for axes, ((case, unit), lines) in zip(grid[:, 0], bars.items(), strict=False):
        _panel(axes, lines)
        axes.set_title(f"{case}, {unit}", fontsize=9, loc="left")
    environment = report.environment
    figure.suptitle(f"{environment.machine}; commit {environment.commit}; {environment.date}", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(rows: list[Row]) -> list[tuple[str, float, Row | None]]:
    """Label, value and, for ours, the row; a measurement that several peers did too stands there once."""
    found: dict[str, list[tuple[str, float, Row | None]]] = {}
    for row in rows:
        lines = found.setdefault(row.metric, [(row.metric, row.value, row)])
        if row.peer is not None and row.peer_value is not None:
            lines.append((row.peer, row.peer_value, None))
    return [line for lines in found.values() for line in lines]


def _panel(axes: Axes, lines: list[tuple[str, float, Row | None]]) -> None:
    for place, (_, value, row) in enumerate(lines):
        axes.barh(place, value, height=0.7, color=_PEER if row is None else _OURS)
        end = value
        if row is not None and row.p99 is not None and row.p99 > value:
            end = row.p99
            axes.plot([value, end], [place, place], color=_SPREAD, linewidth=0.8)
        if row is not None and row.limit_value is not None and row.ratio is None:
            axes.plot([row.limit_value] * 2, [place - 0.45, place + 0.45], color="red", linestyle=":")
        axes.annotate(
            number(value), (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(lines)), [label for label, _, _ in lines], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
