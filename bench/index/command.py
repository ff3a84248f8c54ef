"""The command ``moonpool bench index``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import uvloop
from rich.console import Console

from moonpool.bench.harness.redis import private_redis
from moonpool.bench.index.measurements import Session, Settings
from moonpool.runtime.reports import report

_PATH = click.Path(path_type=Path)


@click.command()
@click.option("--redis", "redis_url", default="", metavar="URL", help="Without it: a private one.")
@click.option("--blocks", default=1_000_000, show_default=True)
@click.option("--nodes", default=16, show_default=True)
@click.option(
    "--rounds", default=5, show_default=True, help="Repetitions of the lookups, the limit's in turn."
)
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
def index(redis_url: str, blocks: int, nodes: int, rounds: int, json_path: Path | None) -> None:
    """Measure the index: publishing, memory, a mirror's start, lookups, and how soon changes are seen."""
    console = Console(stderr=True, highlight=False)
    with private_redis(redis_url) as url, console.status("publishing") as status:
        session = Session(Settings(url, blocks, nodes, rounds), status.update)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(session.run())
    result = report.Report(report.measure_environment(("redis", "hiredis", "uvloop")), rows)
    report.show(result)
    if json_path is not None:
        report.write(result, json_path)
