"""The command ``moonpool bench transfer``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import uvloop
from rich.console import Console

from moonpool.bench.transfer.batch_shape import (
    POOL_NBYTES,
    Shape,
    all_shapes,
    default_shapes,
    size_name,
    size_of,
)
from moonpool.bench.transfer.peers.contestant import PEERS
from moonpool.bench.transfer.process_pair import Settings, measure
from moonpool.runtime.config.options import TcpOptions
from moonpool.runtime.reports import report
from moonpool.transfer.native.cuda import CudaUnavailable, load_cuda
from moonpool.transfer.native.ucx import load_ucx

_PATH = click.Path(path_type=Path)
_PACKAGES = ("numpy", "xxhash", "uvloop", "libucx-cu12")
TRANSPORTS = ("local", "shm", "tcp", "ucx", "ucx-tcp")
ON_DEVICE = ("cuda-ipc", "cuda-shm", "cuda-tcp")


@click.command()
@click.option("--transport", "transports", multiple=True, type=click.Choice((*TRANSPORTS, *ON_DEVICE)))
@click.option(
    "--memory",
    type=click.Choice(("host", "cuda")),
    default="host",
    show_default=True,
    help="Without --transport: all of this kind. cuda: needs a GPU.",
)
@click.option(
    "--block", "blocks", multiple=True, metavar="SIZE", help="Block size such as 64KiB; repeatable."
)
@click.option(
    "--batch",
    "batches",
    multiple=True,
    type=click.IntRange(1),
    help="With --block: blocks a batch; repeatable.",
)
@click.option("--direction", "directions", multiple=True, type=click.Choice(("read", "write")))
@click.option(
    "--parallel",
    default=1,
    type=click.IntRange(1, 64),
    show_default=True,
    help="With --block: batches at a time.",
)
@click.option("--contiguous", is_flag=True, help="With --block: side by side instead of scattered.")
@click.option("--checksum", type=click.Choice(("on", "off", "both")), default="both", show_default=True)
@click.option("--full", is_flag=True, help="4 KiB to 64 MiB, 1 to 4,096 spans (5 minutes a round).")
@click.option("--peer", "peers", multiple=True, type=click.Choice(PEERS), help="Compare with; repeatable.")
@click.option(
    "--rounds",
    default=5,
    type=click.IntRange(1),
    show_default=True,
    help="Repetitions of a case, its limit in turn.",
)
@click.option("--streams", default=TcpOptions().streams, show_default=True, help="tcp: connections.")
@click.option("--slice", "slice_name", default="", metavar="SIZE", help="tcp: bytes a system call.")
@click.option("--busy", is_flag=True, help="The target computes in Python meanwhile.")
@click.option("--pool", "pool_name", default=size_name(POOL_NBYTES), show_default=True, metavar="SIZE")
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
@click.option("--plot", "plot_path", type=_PATH, metavar="FILE", help="Draw GB/s against block size (PNG).")
def transfer(
    transports: tuple[str, ...],
    memory: str,
    blocks: tuple[str, ...],
    batches: tuple[int, ...],
    directions: tuple[str, ...],
    parallel: int,
    contiguous: bool,
    checksum: str,
    full: bool,
    peers: tuple[str, ...],
    rounds: int,
    streams: int,
    slice_name: str,
    busy: bool,
    pool_name: str,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure every path between two processes of this host, beside what the machine can do the same way."""
    console = Console(stderr=True, highlight=False)
    try:
        sizes = [size_of(block) for block in blocks]
        pool_nbytes = size_of(pool_name)
        slice_nbytes = size_of(slice_name) if slice_name else TcpOptions().slice_nbytes
    except ValueError as error:
        raise click.BadParameter(f"sizes look like 64KiB: {error}") from error
    if min([pool_nbytes, *sizes]) < 1:
        raise click.BadParameter("sizes are of one byte or more")
    if not blocks and (batches or contiguous or parallel > 1):
        raise click.UsageError("--batch, --parallel and --contiguous need --block")
    shapes = [
        Shape(size, batch, way, not contiguous, parallel)
        for size in sizes
        for batch in batches or (1, 64)
        for way in directions or ("read", "write")
    ]
    settings = Settings(
        transports=transports or _all_transports(memory),
        shapes=shapes
        or [
            s
            for s in (all_shapes() if full else default_shapes())
            if s.direction in (directions or ("read", "write"))
        ],
        checksums={"on": (True,), "off": (False,), "both": (False, True)}[checksum],
        rounds=rounds,
        tcp=TcpOptions(streams=streams, slice_nbytes=slice_nbytes),
        busy=busy,
        pool_nbytes=pool_nbytes,
        peers=peers,
    )
    if any(name.startswith("ucx") for name in settings.transports) and load_ucx() is None:
        raise click.UsageError("there is no libucp: pip install moonpool[ucx]")
    if any(name in ON_DEVICE for name in settings.transports):
        try:
            load_cuda()
        except CudaUnavailable as error:
            raise click.UsageError(str(error)) from error
    for shape in settings.shapes:
        if shape.nbytes > pool_nbytes:
            raise click.BadParameter(f"{shape.name} is more than the pool of {pool_name} holds; see --pool")
    rows = uvloop.run(measure(settings, lambda line: console.print(line, style="dim")))
    finished = report.Report(report.measure_environment(_PACKAGES), rows)
    report.show(finished)
    if json_path is not None:
        report.write(finished, json_path)
    if plot_path is not None:
        from moonpool.bench.transfer.plot import draw

        draw(finished, plot_path)


def _all_transports(memory: str) -> Sequence[str]:
    if memory == "cuda":
        return ON_DEVICE
    return [name for name in TRANSPORTS if not name.startswith("ucx") or load_ucx()]


if __name__ == "__main__":
    transfer()
