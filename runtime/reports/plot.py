"""A picture of a report: its curves as lines, its rows as bars beside their peers and limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import Curve, Report, Row, number

mpl.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

_OURS, _PEER, _SPREAD = "tab:blue", "silver", "black"
_CURVE_HEIGHT, _LINE_HEIGHT = 4.0, 0.3
# An axis with values further apart than this factor is logarithmic.
_LOG_RANGE = 50.0


def check_ending(path: Path) -> None:
    """Raises ``ConfigError`` for a file that is neither .png nor .svg."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot writes .png or .svg, not {path.name!r}", key="plot")


def draw(report: Report, path: Path) -> None:
    """Write a PNG or SVG, by the file's ending.

    A panel for each group of curves, or, without curves, for each case and unit of the rows: a bar for each
    figure, with peers in grey, the 99th percentile as a thin line and a limit as a dotted one.
    """
    check_ending(path)
    curves: dict[str, list[Curve]] = {}
    for curve in report.curves:
        curves.setdefault(curve.panel, []).append(curve)
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows if not curves else ():
        panels.setdefault((row.case, row.unit), []).append(row)
    bars = {panel: _bars(rows) for panel, rows in panels.items()}
    heights = [_CURVE_HEIGHT] * len(curves) + [_LINE_HEIGHT * (1 + len(lines)) for lines in bars.values()]
    figure, grid = pyplot.subplots(
        max(len(heights), 1),
        1,
        squeeze=False,
        figsize=(9, 0.6 + sum(heights)),
        height_ratios=heights or None,
        layout="constrained",
    )
    axes = list(grid[:, 0])
    for name, lines in curves.items():
        _draw_curves(axes.pop(0), name, lines)
    for (case, unit), bar in bars.items():
        _draw_bars(axes.pop(0), f"{case}, {unit}", bar)
    environment = report.environment
    figure.suptitle(f"{environment.machine}; commit {environment.commit}; {environment.date}", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_curves(axes: Axes, name: str, curves: Sequence[Curve]) -> None:
    for curve in curves:
        points = sorted(curve.points)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=curve.name,
            marker="." if len(points) < 50 else "",
        )
    xs = [x for curve in curves for x, _ in curve.points]
    if xs and min(xs) > 0 and max(xs) > _LOG_RANGE * min(xs):
        axes.set_xscale("log")
    axes.set(title=name, xlabel=curves[0].x, ylabel=curves[0].y)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)


def _bars(rows: list[Row]) -> list[tuple[str, float, Row | None]]:
    """Label, value and, for ours, the row. A measurement with several peers appears once."""
    found: dict[str, list[tuple[str, float, Row | None]]] = {}
    for row in rows:
        lines = found.setdefault(row.metric, [(row.metric, row.value, row)])
        if row.peer is not None and row.peer_value is not None:
            lines.append((row.peer, row.peer_value, None))
    return [line for lines in found.values() for line in lines]


def _draw_bars(axes: Axes, title: str, lines: list[tuple[str, float, Row | None]]) -> None:
    for y, (_, value, row) in enumerate(lines):
        axes.barh(y, value, height=0.7, color=_PEER if row is None else _OURS)
        end = value
        if row is not None and row.p99 is not None and row.p99 > value:
            end = row.p99
            axes.plot([value, end], [y, y], color=_SPREAD, linewidth=0.8)
        if row is not None and row.limit_value is not None and row.ratio is None:
            axes.plot([row.limit_value] * 2, [y - 0.45, y + 0.45], color="red", linestyle=":")
        axes.annotate(
            number(value), (end, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_yticks(range(len(lines)), [label for label, _, _ in lines], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
