"""The command ``moonpool bench store``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click
import uvloop
from rich.console import Console

from moonpool.bench.store.block_set import TierSettings
from moonpool.bench.store.peers.peer_store import LIBRARIES
from moonpool.bench.store.remote_objects import remote_cases
from moonpool.bench.store.settings import Settings
from moonpool.bench.store.tiers import measure
from moonpool.bench.transfer.batch_shape import size_of
from moonpool.runtime.config.options import SsdTierOptions
from moonpool.runtime.reports import report

_PATH = click.Path(path_type=Path)
_PACKAGES = ("numpy", "xxhash", "lmdb", "uvloop", "grpcio", "protobuf")
TIERS = ("host", "disk")
CASES = (*TIERS, "remote")


@click.command()
@click.option("--cases", multiple=True, type=click.Choice(CASES), help="Only these; repeatable.")
@click.option(
    "--block", "blocks", multiple=True, metavar="SIZE", help="Of the tiers, such as 64KiB; repeatable."
)
@click.option(
    "--total", default="512MiB", show_default=True, metavar="SIZE", help="Of all blocks of a round."
)
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1), help="Everybody in turn.")
@click.option(
    "--threads",
    default=SsdTierOptions().io_threads,
    show_default=True,
    type=click.IntRange(1, 64),
    help="That read and write the disk: its queue depth.",
)
@click.option("--directory", default=".", type=_PATH, show_default=True, help="On the disk to be measured.")
@click.option("--peer", "peers", multiple=True, type=click.Choice(tuple(LIBRARIES)))
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
def store(
    cases: tuple[str, ...],
    blocks: tuple[str, ...],
    total: str,
    rounds: int,
    threads: int,
    directory: Path,
    peers: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Measure the store's tiers and nodes, each beside what the machine can do, and other stores."""
    console = Console(stderr=True, highlight=False)
    try:
        sizes = [size_of(block) for block in blocks or ("1MiB", "4MiB")]
        total_nbytes = size_of(total)
    except ValueError as error:
        raise click.BadParameter(f"sizes look like 64KiB: {error}") from error
    if any(size % 4096 or size <= 0 for size in sizes):
        raise click.BadParameter("blocks are whole pages of 4KiB here, as the raw disk needs them")
    if not directory.is_dir():
        raise click.BadParameter(f"{directory} is no directory")
    free = shutil.disk_usage(directory).free
    if free < 6 * total_nbytes and "disk" in (cases or CASES):
        raise click.BadParameter(
            f"{directory} has {free >> 20} MiB free; six times --total is needed: give less, "
            "or another --directory"
        )
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=directory) as place:
        settings = TierSettings(Path(place).resolve(), total_nbytes, rounds, threads)
        say = lambda line: console.print(line, style="dim")  # noqa: E731
        tiers = [case for case in TIERS if case in (cases or CASES)]

        async def run() -> list[report.Row]:
            rows = await measure(settings, sizes, tiers, peers, say) if tiers else []
            if "remote" in (cases or CASES):
                rows += await remote_cases(Settings(rounds, tuple(set(peers) & {"mooncake"}), say))
            return rows

        rows = uvloop.run(run())
    finished = report.Report(report.measure_environment(_PACKAGES), rows)
    report.show(finished)
    if json_path is not None:
        report.write(finished, json_path)


if __name__ == "__main__":
    store()
