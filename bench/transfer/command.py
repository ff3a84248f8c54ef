"""The command ``moonpool bench transfer``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import click

from moonpool.bench.harness.command import Rows, Run, benchmark
from moonpool.bench.harness.sizes import MIB, SIZE, size_name
from moonpool.bench.transfer.peers.contestants import PEERS
from moonpool.bench.transfer.perimeter import perimeter_rows
from moonpool.bench.transfer.session import Settings, transport_rows
from moonpool.bench.transfer.shapes import POOL_NBYTES, Shape, default_shapes, small_shapes
from moonpool.runtime.config.options import TcpOptions
from moonpool.runtime.reports.conditions import NO_CACHE, Conditions
from moonpool.transfer.native.cuda import CudaUnavailable, load_cuda
from moonpool.transfer.native.ucx import load_ucx

_TRANSPORTS = ("local", "shm", "tcp", "ucx", "ucx-tcp")
_ON_DEVICE = ("cuda-ipc", "cuda-shm", "cuda-tcp")
_WAYS = ("read", "write")
_PARTS: dict[str, Callable[[Run, Settings], Rows]] = {
    name: partial(transport_rows, transport=name) for name in (*_TRANSPORTS, *_ON_DEVICE)
}
_PARTS["perimeter"] = perimeter_rows


@benchmark(
    _PARTS,
    packages=("numpy", "xxhash", "uvloop", "libucx-cu12"),
    peers=PEERS,
    part_options=("--transport", "--part"),
    default=_TRANSPORTS,
)
@click.option(
    "--memory",
    type=click.Choice(("host", "cuda")),
    default="host",
    help="Without --transport: all transports of this memory. cuda needs a GPU.",
)
@click.option("--small", is_flag=True, help="Only small batches: 4 KiB x 1 and 64 KiB x 16.")
@click.option("--block", "blocks", multiple=True, type=SIZE, help="Block size such as 64KiB; repeatable.")
@click.option(
    "--batch",
    "batches",
    multiple=True,
    type=click.IntRange(1),
    help="With --block: blocks of a batch; repeatable.",
)
@click.option("--direction", "directions", multiple=True, type=click.Choice(_WAYS))
@click.option("--parallel", default=1, type=click.IntRange(1, 64), help="With --block: batches at a time.")
@click.option("--contiguous", is_flag=True, help="With --block: side by side instead of scattered.")
@click.option("--checksum", type=click.Choice(("on", "off", "both")), default="both")
@click.option("--streams", default=TcpOptions().streams, help="tcp: connections.")
@click.option(
    "--slice",
    "slice_nbytes",
    type=SIZE,
    default=size_name(TcpOptions().slice_nbytes),
    help="tcp: of a system call.",
)
@click.option("--busy", is_flag=True, help="The target computes in Python meanwhile.")
@click.option("--pool", type=SIZE, default=size_name(POOL_NBYTES), help="Memory of each side.")
def transfer(
    run: Run,
    memory: str,
    small: bool,
    blocks: tuple[int, ...],
    batches: tuple[int, ...],
    directions: tuple[str, ...],
    parallel: int,
    contiguous: bool,
    checksum: str,
    streams: int,
    slice_nbytes: int,
    busy: bool,
    pool: int,
) -> Settings:
    """Measure each path between two processes of this host, beside what the machine moves the same way.

    perimeter: what TLS and a cluster key cost.
    """
    if not blocks and (batches or contiguous or parallel > 1):
        raise click.UsageError("--batch, --parallel and --contiguous need --block")
    if blocks and small:
        raise click.UsageError("--small has blocks of its own: drop --block")
    shapes = [
        Shape(size, batch, way, not contiguous, parallel)
        for size, batch, way in product(blocks, batches or (1, 64), directions or _WAYS)
    ]
    if not blocks:
        usual = [Shape(MIB, 64, way) for way in _WAYS] if run.quick else default_shapes()
        usual = small_shapes() if small else usual
        shapes = [shape for shape in usual if shape.direction in (directions or _WAYS)]
    if not run.named:
        run.parts = [name for name in _TRANSPORTS if not name.startswith("ucx") or load_ucx()]
        if memory == "cuda":
            run.parts = list(_ON_DEVICE)
    if any(name.startswith("ucx") for name in run.parts) and load_ucx() is None:
        raise click.UsageError("there is no libucp: pip install moonpool[ucx]")
    if any(name in _ON_DEVICE for name in run.parts):
        try:
            load_cuda()
        except CudaUnavailable as error:
            raise click.UsageError(str(error)) from error
    for shape in shapes:
        if shape.nbytes > pool:
            raise click.BadParameter(
                f"{shape.name} does not fit into the pool of {size_name(pool)}; see --pool"
            )
    run.conditions = Conditions(
        [], NO_CACHE, "a batch before each turn; notes: a tenth of them", {"places of blocks": 1}
    )
    checksums = {"on": (True,), "off": (False,), "both": (False, True)}[checksum]
    return Settings(shapes, checksums, TcpOptions(streams=streams, slice_nbytes=slice_nbytes), busy, pool)
