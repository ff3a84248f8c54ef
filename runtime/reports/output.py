"""The output of a benchmark: a table, a JSON file, a picture."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.console import Console

from moonpool.runtime.reports.report import Report, show, write


class ResultFile(click.Path):
    """An option: a file that is written at the end. Refused at once where it cannot be, not after the run."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(
                f"{path} cannot be written: there is no directory {path.parent}; make it first", param, ctx
            )
        if not os.access(path.parent, os.W_OK):
            self.fail(f"{path} cannot be written: {path.parent} is not yours to write to", param, ctx)
        return path


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
