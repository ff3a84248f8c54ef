"""What the benchmark asks of a peer, and the peers there are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from moonpool.bench.harness.peer_environment import python_of
from moonpool.bench.transfer.batch_shape import Shape
from moonpool.bench.transfer.peers.engine_pair import Library, engine_pair
from moonpool.bench.transfer.peers.perftest import PerfTest

PEERS = ("mooncake", "nixl", "ucx_perftest")
_ON_HOST = {"UCX_TLS": "all"}
_OVER_TCP = {"UCX_TLS": "tcp,self"}
# For Mooncake: without verbs it still asks for their libraries.
_VERBS = "apt install libibverbs1 librdmacm1 libnuma1"
_MOONCAKE = Library("mooncake", ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"), _VERBS)
_NIXL = Library("nixl", ("nixl-cu12==1.5.1", "torch==2.13.0+cpu", "numpy"))


class Contestant(Protocol):
    """Costs nothing while it is others' turn."""

    name: str

    async def prepare(self, shape: Shape) -> None: ...

    async def move(self, seconds: float) -> list[float]:
        """All parallel batches of the shape, again and again for so long. Returns the seconds each pass took
        but the first.
        """

    def cpu_seconds(self) -> float:
        """Of all its processes, so far."""


def require(peers: tuple[str, ...]) -> None:
    """Raises PeerAbsent where one of them is not installed."""
    for library in (_MOONCAKE, _NIXL):
        if library.name in peers:
            python_of(library.name, library.packages, library.also)
    if "ucx_perftest" in peers:
        PerfTest.found({})


@asynccontextmanager
async def contestants(
    peers: tuple[str, ...], over_tcp: bool, pool_nbytes: int, say: Callable[[str], None]
) -> AsyncIterator[list[Contestant]]:
    """The ``peers`` that move bytes on this host, or over TCP, running; ended at the end.

    Raises PeerFailed.
    """
    async with AsyncExitStack() as stack:
        found: list[Contestant] = []

        async def add(library: Library, name: str, *variants: str, **environment: str) -> None:
            say(f"starting {name}")
            pair = engine_pair(library, name, (variants[0], variants[-1]), environment, pool_nbytes)
            found.append(await stack.enter_async_context(pair))

        if "mooncake" in peers and over_tcp:
            # It has no other way on one host without RDMA.
            await add(_MOONCAKE, "mooncake", "tcp")
        if "nixl" in peers and over_tcp:
            await add(_NIXL, "nixl tcp", "thread", **_OVER_TCP)
        if "nixl" in peers and not over_tcp:
            await add(_NIXL, "nixl", "thread", **_ON_HOST)
            # Its best. The target needs one all the same: without, nobody answers the first request.
            await add(_NIXL, "nixl no-thread", "thread", "no-thread", **_ON_HOST)
        if "ucx_perftest" in peers:
            found.append(PerfTest.found(_OVER_TCP if over_tcp else {"UCX_TLS": "posix,cma,self"}))
        yield found
