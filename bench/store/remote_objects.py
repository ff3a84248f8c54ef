"""Objects put on a store node and got from it, beside the transfer path alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from moonpool.bench.harness.child import Child, peer
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import daemon, redis
from moonpool.bench.harness.sizes import MIB
from moonpool.bench.harness.turns import Call, compared, repeat, spread, turns
from moonpool.bench.store.blocks import Settings
from moonpool.bench.store.host_tier import MOONCAKE
from moonpool.kvstore.client import StoreClient, Tenant, open_client
from moonpool.kvstore.client.connections import IndexDirectory
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import node_pb2, store_pb2
from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.reports.report import Row
from moonpool.transfer import Span, TransferAgent, checksum

_CAPACITY_NBYTES = 1024 * MIB
_TURN_S = 0.15
_DEADLINE_S = 30.0

Move = Callable[[], Awaitable[float]]  # moves all objects of a case once; returns seconds
Objects = dict[str, npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class _Case:
    """``count`` objects of ``nbytes``, moved in one call."""

    way: str  # "get" or "put"
    count: int
    nbytes: int

    @property
    def name(self) -> str:
        return f"remote/{self.way}/{self.count} × {self.nbytes // MIB} MiB"


_SIZES = ((64, MIB), (1, 64 * MIB), (4, 64 * MIB), (1, MIB))
_CASES = [_Case(way, *size) for way, size in product(("get", "put"), _SIZES)]


async def remote_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Our bandwidth, beside the transfer path's own and Mooncake Store's, and our latency."""
    async with AsyncExitStack() as stack:
        mooncake = None
        if "mooncake" in run.peers:
            node = peer("mooncake", MOONCAKE, "Mooncake", paused=False, lent_nbytes=_CAPACITY_NBYTES)
            port = (await stack.enter_async_context(node)).ready
            client = peer("mooncake", MOONCAKE, "Mooncake", paused=False, lent_nbytes=0, master_port=port)
            mooncake = await stack.enter_async_context(client)
        running = await stack.enter_async_context(session())
        for case in [case for case in _CASES if case.count == 1] if run.quick else _CASES:
            run.say(case.name)
            for row in await _case_rows(running, case, run.rounds, mooncake):
                yield row


async def _case_rows(session: Session, case: _Case, rounds: int, mooncake: Child | None) -> list[Row]:
    order = list(range(case.count))

    async def mooncake_move() -> float:
        assert mooncake is not None
        return float(await mooncake.call(case.way, **({"order": order} if case.way == "get" else {})))

    async with session.moves(case) as (ours, path):
        moves: dict[str, Move] = {"moonpool": ours, "the transfer path itself": path}
        if mooncake is not None:
            await mooncake.call("prepare", count=case.count, nbytes=case.nbytes, batch=case.count)
            await mooncake.call("put")
            moves["mooncake store"] = mooncake_move
        contestants: dict[str, Call] = {
            name: lambda move=move: repeat(move, _TURN_S)  # type: ignore[misc]
            for name, move in moves.items()
        }
        seconds = await turns(contestants, rounds, warm_up=0)
    nbytes = case.count * case.nbytes
    rows = compared(case.name, "bandwidth", "GB/s", seconds, lambda median_s: nbytes / median_s / 1e9)
    return [*rows, spread(case.name, "latency", seconds["moonpool"], "ms", 1e3)]


class Session:
    """A store node in another process, a client of it, and a second agent that moves the same bytes alone."""

    def __init__(self, client: StoreClient, agent: TransferAgent, node: RemoteStore) -> None:
        self.client = client
        self._agent = agent
        self._node = node

    @asynccontextmanager
    async def moves(self, case: _Case) -> AsyncIterator[tuple[Move, Move]]:
        """A function that moves a case through the client, and one that moves the same spans without it."""
        memory = np.random.default_rng(case.nbytes).integers(0, 256, case.count * case.nbytes, np.uint8)
        parts = memory.reshape(case.count, case.nbytes)
        objects = {f"{case.nbytes}-{n}": part for n, part in enumerate(parts)}
        await self.client.batch_put(objects)
        # Both know the memory beforehand, as Mooncake does.
        with self._agent.register(memory) as region, self.client.registered(memory):
            path = self._reading if case.way == "get" else self._writing
            async with path(objects, region.id, case) as move:
                yield self._through_client(case.way, objects), move
        await self.client.batch_remove(list(objects))

    def _through_client(self, way: str, objects: Objects) -> Move:
        async def move() -> float:
            began_s = time.perf_counter()
            if way == "get":
                found = await self.client.batch_get_into(objects)
                assert all(found)
            else:
                await self.client.batch_put(objects)
            return time.perf_counter() - began_s

        return move

    @asynccontextmanager
    async def _reading(self, objects: Objects, region: int, case: _Case) -> AsyncIterator[Move]:
        owner = self.client.tenant.owner
        theirs: list[Span] = []
        checksums: list[int] = []
        leased: list[store_pb2.OpenedObject] = []
        chunk_nbytes = 1
        for name in objects:
            first = 0
            while first * chunk_nbytes < case.nbytes:
                wanted = store_pb2.OpenObject(key=self.client.tenant.key(name), first_chunk=first)
                (opened,), chunk_nbytes, _ = await self._node.open(owner, [wanted])
                leased.append(opened)
                theirs += _spans(opened.chunks, chunk_nbytes)
                checksums += opened.chunks.checksum
                first += len(opened.chunks.offset)
        ours = [Span(region, number * chunk_nbytes, chunk_nbytes) for number in range(len(theirs))]
        peer_node = await self._node.peer()

        async def move() -> float:
            began_s = time.perf_counter()
            await peer_node.read(ours, theirs, deadline_s=_DEADLINE_S, checksums=checksums)
            return time.perf_counter() - began_s

        yield move
        self._node.release(leased)

    @asynccontextmanager
    async def _writing(self, objects: Objects, region: int, case: _Case) -> AsyncIterator[Move]:
        # As large as one window: more cannot be reserved before the first part is committed.
        infos = [
            store_pb2.ObjectInfo(key=bytes([n]) * 16, storage=n + 1, name=f"raw-{n}", nbytes=case.nbytes)
            for n in range(case.count)
        ]
        reply, _ = await self._node.begin(self.client.tenant.owner, infos)
        steps, chunk_nbytes = reply.steps, reply.chunk_nbytes
        theirs = [span for step in steps for span in _spans(step.chunks, chunk_nbytes)]
        ours = [Span(region, number * chunk_nbytes, chunk_nbytes) for number in range(len(theirs))]
        data = self._agent.regions.get(region).buffer
        peer_node = await self._node.peer()

        async def move() -> float:
            # The writer computes the checksums, as in a put.
            began_s = time.perf_counter()
            sums = await asyncio.to_thread(
                lambda: [checksum(data[span.offset : span.offset + span.nbytes]) for span in ours]
            )
            await peer_node.write(
                ours, theirs, deadline_s=_DEADLINE_S, checksums=sums, grant=reply.write_grant
            )
            return time.perf_counter() - began_s

        yield move
        await self._node.call("Abort", store_pb2.AbortRequest(put_id=[step.put_id for step in steps]))


def _spans(chunks: node_pb2.BlockSpans, nbytes: int) -> list[Span]:
    return [Span(region, offset, nbytes) for region, offset in zip(chunks.region, chunks.offset, strict=True)]


@asynccontextmanager
async def session() -> AsyncIterator[Session]:
    """A store node, and what measures it."""
    options = TransferOptions(deadline_s=_DEADLINE_S)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(redis())
        sets = [
            f"index.redis_url={url}",
            "store.host.capacity_nbytes=1MiB",
            "node.id=store",
            f"store_node.object_nbytes={_CAPACITY_NBYTES}",
            f"transfer.deadline_s={_DEADLINE_S}",
        ]
        node = await stack.enter_async_context(daemon("moonpool.kvstore.store_node", sets))
        directory = IndexDirectory(url, "moonpool")
        stack.push_async_callback(directory.aclose)
        client = await stack.enter_async_context(
            open_client(directory, url, tenant=Tenant(), deadline_s=_DEADLINE_S, transfer=options)
        )
        agent = await stack.enter_async_context(await TransferAgent.start(options, agent_id="alone", epoch=1))
        remote = RemoteStore("store", node.ready["rpc_address"], agent, deadline_s=_DEADLINE_S)
        yield Session(client, agent, await stack.enter_async_context(remote))
