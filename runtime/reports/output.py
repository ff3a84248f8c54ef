"""The output of a benchmark: a table, a JSON file, a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from moonpool.runtime.reports.report import Report, show, write


def finish(report: Report, json_path: Path | None, plot_path: Path | None = None) -> None:
    """Print the table; write the JSON and the picture where paths are given."""
    show(report)
    if json_path is not None:
        write(report, json_path)
        if report.environment.commit.endswith("+"):
            warning = (
                f"{json_path}: measured with uncommitted changes; commit them and measure again to keep it"
            )
            Console(stderr=True, highlight=False).print(warning, style="yellow")
    if plot_path is not None:
        from moonpool.runtime.reports.plot import draw

        draw(report, plot_path)
