"""The commands under ``moonpool bench``. A command's module is imported when the command is called."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

_NAMES = (
    *("chaos", "conductor", "drill", "elastic", "engine", "eviction", "index", "kernels", "migrate"),
    *("parallel", "regions", "serve", "simulate", "store", "transfer", "vllm"),
)
_FOLDERS = {"simulate": "simulation"}


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*_NAMES, *self.commands])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _NAMES:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"moonpool.bench.{_FOLDERS.get(cmd_name, cmd_name)}.command")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Group)
def bench() -> None:
    """Measure: serving, and its parts."""


@bench.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
def plot(result: Path, picture: Path) -> None:
    """Draw RESULT, a file of --json, as PICTURE (PNG, SVG)."""
    from moonpool.runtime.reports.plot import draw
    from moonpool.runtime.reports.report import read

    draw(read(result), picture)


@bench.command()
@click.argument(
    "results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--confidence",
    default=0.95,
    show_default=True,
    type=click.FloatRange(0.5, 1, min_open=True, max_open=True),
    help="Share of such intervals that contain the true change.",
)
@click.option(
    "--worse",
    type=click.FloatRange(0, 100),
    help="Fail if a time or rate became worse by more percent, with its whole interval. Needs several pairs.",
)
def compare(results: tuple[Path, ...], confidence: float, worse: float | None) -> None:
    """Compare RESULTS, files of --json: BEFORE AFTER, or BEFORE AFTER BEFORE AFTER … measured in this order.

    Intervals are of AFTER over BEFORE, by bootstrap. A change is real when several pairs of runs agree beyond
    their noise. One pair is compared round by round and only "differs": the machine may have changed, too.
    """
    from moonpool.runtime.reports.comparison import (
        compare_runs,
        differences,
        least_samples,
        show_changes,
    )
    from moonpool.runtime.reports.report import read

    if len(results) % 2:
        raise click.UsageError(f"files come in pairs, BEFORE AFTER; got {len(results)}")
    fewest = least_samples(confidence)
    if worse is not None and len(results) < 2 * fewest:
        raise click.UsageError(f"--worse needs {fewest} pairs of runs or more, got {len(results) // 2}")
    reports = [read(path) for path in results]
    changes = compare_runs(reports[::2], reports[1::2], confidence)
    if not changes:
        raise click.UsageError("the files have no measurement in common")
    show_changes(changes, differences(reports), confidence)
    if worse is not None and (found := [change for change in changes if change.is_worse(worse)]):
        names = ", ".join(f"{change.metric} of {change.case!r}" for change in found)
        raise click.ClickException(f"worse by more than {worse:g} %: {names}")
