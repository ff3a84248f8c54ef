"""The command ``moonpool bench store``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import uvloop
from rich.console import Console

from bench import report
from bench.report import Row
from bench.store.remote import remote_cases
from bench.store.settings import Settings

_PACKAGES = ("numpy", "xxhash", "uvloop", "grpcio", "protobuf", "lmdb")

CASES: dict[str, Callable[[Settings], Awaitable[list[Row]]]] = {"remote": remote_cases}


@click.command()
@click.option("--cases", multiple=True, type=click.Choice(tuple(CASES)), help="Only these; repeatable.")
@click.option("--peer", "peers", multiple=True, type=click.Choice(("mooncake",)), help="Compare with.")
@click.option("--rounds", default=5, show_default=True, help="Repetitions of a case, its limit in turn.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the report there."
)
def store(cases: tuple[str, ...], peers: tuple[str, ...], rounds: int, json_path: Path | None) -> None:
    """Measure the store's tiers and nodes, each beside what the machine can do the same way."""
    console = Console(stderr=True, highlight=False)
    settings = Settings(rounds, peers, lambda line: console.print(line, style="dim"))

    async def run() -> list[Row]:
        return [row for name in cases or CASES for row in await CASES[name](settings)]

    finished = report.Report(report.measure_environment(_PACKAGES), uvloop.run(run()))
    report.show(finished)
    if json_path is not None:
        report.write(finished, json_path)
