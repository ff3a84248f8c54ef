"""The command ``moonpool bench store``."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import click

from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.peers import python_of
from moonpool.bench.harness.sizes import MIB, SIZE
from moonpool.bench.store.blocks import Settings, Shape
from moonpool.bench.store.disk_tier import disk_rows
from moonpool.bench.store.host_tier import host_rows
from moonpool.bench.store.remote_objects import remote_rows
from moonpool.bench.store.small_objects import small_rows
from moonpool.runtime.config.options import SsdTierOptions
from moonpool.runtime.reports.conditions import CacheState, Conditions

_QUICK_NBYTES = 32 * MIB


@benchmark(
    {"host": host_rows, "disk": disk_rows, "remote": remote_rows, "small": small_rows},
    packages=("numpy", "xxhash", "lmdb", "uvloop", "grpcio", "protobuf"),
    peers={name: partial(python_of, name) for name in ("lmcache", "mooncake")},
    rounds=7,
    part_options=("--part", "--case", "--cases"),
)
@click.option("--block", "blocks", multiple=True, type=SIZE, help="Block size of the tiers; repeatable.")
@click.option("--total", type=SIZE, default="512MiB", help="All blocks of a round.")
@click.option(
    "--threads",
    default=SsdTierOptions().io_threads,
    type=click.IntRange(1, 64),
    help="Threads that read and write the disk: its queue depth.",
)
@click.option("--directory", default=".", type=click.Path(path_type=Path), help="On the disk to be measured.")
@click.option("--small", is_flag=True, help="Only single objects and small ones: latency, and rates.")
def store(
    run: Run, blocks: tuple[int, ...], total: int, threads: int, directory: Path, small: bool
) -> Settings:
    """Measure the store's tiers and store nodes, beside what the machine can do and beside other stores."""
    if small:
        run.parts = ["small"]
    total = min(total, _QUICK_NBYTES) if run.quick else total
    sizes = blocks or ((MIB,) if run.quick else (MIB, 4 * MIB))
    if any(size % 4096 for size in sizes):
        raise click.BadParameter("blocks must be whole pages of 4KiB, as the raw disk needs them")
    if not directory.is_dir():
        raise click.BadParameter(f"{directory} is no directory")
    free = shutil.disk_usage(directory).free
    needed = 6 * max(Shape.of(size, total).nbytes for size in sizes)
    if free < needed and "disk" in run.parts:
        raise click.BadParameter(
            f"{directory} has {free >> 20} MiB free; {needed >> 20} MiB are needed, six times the blocks of "
            "a round, eight or more: give less --total or --block, or another --directory"
        )
    run.conditions = Conditions(
        [],
        CacheState.holding(
            0, 0, "new blocks each round; a get finds those of the round's put; O_DIRECT on disks"
        ),
        "host: a round; disk: rounds until its room is full; remote, small: nothing",
        {"bytes of blocks": 1},
    )
    return Settings(directory.resolve(), sizes, total, threads)
