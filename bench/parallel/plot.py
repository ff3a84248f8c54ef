"""Where the time of each plan's steps goes, of experts on several ranks, and how fast blocks go from plan to
plan: a picture of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moonpool.bench.parallel import handover
from moonpool.runtime.reports.report import Report

_SHARES = ("computing, busiest rank", "exchanging, most", "bubble, most")
_EXPERTS = ("in all-to-all, most", "busiest rank over mean")


def draw(report: Report, path: Path) -> None:
    """Write a PNG. ClickException where matplotlib is missing, or no plan of several ranks was measured."""
    try:
        import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    drawings = [
        (metrics, label, cases)
        for metrics, label in (
            (_SHARES, "of the step"),
            (_EXPERTS, "of the step, and ×"),
            ((handover.BLOCKS, handover.BOUND), "GB/s"),
            ((handover.SECONDS,), "s"),
        )
        if (cases := list(dict.fromkeys(row.case for row in report.rows if row.metric in metrics)))
    ]
    if not drawings:
        raise click.ClickException(
            "--plot needs a plan of several ranks, and --part steps, experts or handover"
        )
    heights = [1 + 0.8 * len(cases) for _, _, cases in drawings]
    figure, rows = pyplot.subplots(
        len(drawings), figsize=(9, sum(heights)), squeeze=False, height_ratios=heights
    )
    for (axes,), (metrics, label, cases) in zip(rows, drawings, strict=True):
        _bars(axes, report, metrics, cases)
        axes.set_xlabel(label)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axes: Any, report: Report, metrics: tuple[str, ...], cases: list[str]) -> None:
    values = {(row.case, row.metric): row.value for row in report.rows}
    for i, metric in enumerate(metrics):
        places = [place + 0.25 * i for place in range(len(cases))]
        axes.barh(places, [values.get((case, metric), 0.0) for case in cases], height=0.22, label=metric)
    axes.set_yticks([place + 0.25 for place in range(len(cases))], cases)
    axes.legend(fontsize="small")
