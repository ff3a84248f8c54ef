"""What the benchmark needs of a peer, and the peers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from moonpool.bench.harness.child import Child, peer
from moonpool.bench.harness.peers import python_of
from moonpool.bench.transfer.peers.perftest import PerfTest
from moonpool.bench.transfer.shapes import Shape

PEERS: dict[str, Callable[[], object]] = {
    "mooncake": partial(python_of, "mooncake"),
    "nixl": partial(python_of, "nixl"),
    "ucx_perftest": partial(PerfTest.found, {}),
}
_ENGINE = Path(__file__).with_name("engine_child.py")
# (label, peer, over TCP, variants of the target and of the client). Without RDMA Mooncake has only TCP.
# NIXL's fastest client has no progress thread; without one its target never answers the first request.
_ENGINES = (
    ("mooncake", "mooncake", True, ("tcp", "tcp")),
    ("nixl tcp", "nixl", True, ("thread", "thread")),
    ("nixl", "nixl", False, ("thread", "thread")),
    ("nixl no-thread", "nixl", False, ("thread", "no-thread")),
)


class EnginePair:
    """A library in two processes of its own Python, which use no processor during others' turns."""

    def __init__(self, name: str, client: Child, target: Child, pool_nbytes: int) -> None:
        self.name = name
        self._client = client
        self._target = target
        self._pool_nbytes = pool_nbytes

    async def prepare(self, shape: Shape) -> None:
        here, there = (
            [
                [child.ready["address"] + offset for offset in spans.offset.tolist()]
                for spans in shape.spans(0, self._pool_nbytes, side)
            ]
            for side, child in enumerate((self._client, self._target))
        )
        with self._target.turn():
            await self._client.call(
                "prepare", direction=shape.direction, nbytes=shape.block_nbytes, here=here, there=there
            )

    async def move(self, seconds: float) -> list[float]:
        """All parallel batches of the shape, again and again: the seconds of each pass but the first."""
        with self._target.turn():
            return list(await self._client.call("move", seconds=seconds))

    def cpu_s(self) -> float:
        """Processor seconds of all its processes, so far."""
        return self._client.cpu_s() + self._target.cpu_s()


Contestant = EnginePair | PerfTest


@asynccontextmanager
async def contestants(
    peers: tuple[str, ...], over_tcp: bool, pool_nbytes: int, say: Callable[[str], None]
) -> AsyncIterator[list[Contestant]]:
    """The ``peers`` that move bytes within this host, or over TCP. Raises ``PeerFailed``."""
    async with AsyncExitStack() as stack:
        found: list[Contestant] = []
        for label, name, for_tcp, variants in _ENGINES:
            if name not in peers or for_tcp is not over_tcp:
                continue
            say(f"starting {label}")
            tls = {"UCX_TLS": "tcp,self" if over_tcp else "all"}
            target, client = [
                await stack.enter_async_context(
                    peer(
                        name,
                        _ENGINE,
                        "Side",
                        label=label,
                        environment=tls,
                        engine=name,
                        pool_nbytes=pool_nbytes,
                        variant=variant,
                    )
                )
                for variant in variants
            ]
            with target.turn():
                await client.call("connect", facts=target.ready["facts"])
            found.append(EnginePair(label, client, target, pool_nbytes))
        if "ucx_perftest" in peers:
            found.append(PerfTest.found({"UCX_TLS": "tcp,self" if over_tcp else "posix,cma,self"}))
        yield found
