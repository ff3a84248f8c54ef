"""Where the time of each plan's decode steps goes: a picture of a report."""

from __future__ import annotations

from pathlib import Path

import click

from bench.report import Report

_SHARES = ("computing, busiest rank", "exchanging, most", "bubble, most")


def draw(report: Report, path: Path) -> None:
    """Write a PNG. ClickException where matplotlib is missing, or no plan of several ranks was measured."""
    try:
        import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(row.case for row in report.rows if row.metric in _SHARES))
    if not cases:
        raise click.ClickException("--plot needs a plan of several ranks, and --part steps")
    values = {(row.case, row.metric): row.value for row in report.rows}
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.8 * len(cases)))
    for i, share in enumerate(_SHARES):
        places = [place + 0.25 * i for place in range(len(cases))]
        axes.barh(places, [values[case, share] for case in cases], height=0.22, label=share)
    axes.set_yticks([place + 0.25 for place in range(len(cases))], cases)
    axes.set_xlabel("of the step")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
