"""Objects put on a store node and got from it, beside what the transfer path itself gives."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.bench.harness.redis import private_redis
from moonpool.bench.store.peers.mooncake_remote import MooncakeStore
from moonpool.bench.store.settings import Settings
from moonpool.kvstore.client import StoreClient, Tenant, open_client
from moonpool.kvstore.client.discovery import IndexDirectory
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.reports.report import Row, versus
from moonpool.runtime.service.child import tied_command
from moonpool.transfer import Span, TransferAgent, checksum

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
_LENT_NBYTES = 512 << 20
_TURN_S = 0.15
# What a get should reach of the transfer path's own figure, and a put.
_REACH = {"get": 0.85}
_DEADLINE_S = 30.0

Move = Callable[[], Awaitable[float]]  # moves all objects of a case once; the seconds it took


@dataclass(frozen=True, slots=True)
class _Case:
    """``count`` objects of ``nbytes``, moved in one call."""

    way: str  # "get" or "put"
    count: int
    nbytes: int

    @property
    def name(self) -> str:
        return f"remote/{self.way}/{self.count} × {self.nbytes // MIB} MiB"


CASES = tuple(
    _Case(way, count, nbytes)
    for way in ("get", "put")
    for count, nbytes in ((64, MIB), (1, 64 * MIB), (4, 64 * MIB), (1, MIB))
)


@dataclass(slots=True)
class _Turns:
    """Who moves, and how long each time took."""

    name: str
    move: Move
    seconds: list[float] = field(default_factory=list)

    async def take(self) -> None:
        until = time.perf_counter() + _TURN_S
        while True:
            self.seconds.append(await self.move())
            if time.perf_counter() > until:
                return

    def gb_per_s(self, nbytes: int) -> float:
        return nbytes / statistics.median(self.seconds) / 1e9


async def remote_cases(settings: Settings) -> list[Row]:
    """Our figure of each case, the path's own beside it, and Mooncake Store's where it is asked for."""
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        mooncake = None
        if "mooncake" in settings.peers:
            mooncake = await stack.enter_async_context(MooncakeStore.start(2 * _LENT_NBYTES))
        session = await stack.enter_async_context(_session())
        for case in CASES:
            settings.say(case.name)
            rows += await _run(session, case, settings.rounds, mooncake)
    return rows


async def _run(session: _Session, case: _Case, rounds: int, mooncake: MooncakeStore | None) -> list[Row]:
    async with session.moves(case) as (ours, path):
        turns = [_Turns("ours", ours), _Turns("the transfer path itself", path)]
        if mooncake is not None:
            await mooncake.prepare(case.count, case.nbytes)
        theirs: list[float] = []
        for _ in range(rounds):
            for turn in turns:
                await turn.take()
            if mooncake is not None:
                theirs += await mooncake.move(case.way, _TURN_S)
    nbytes = case.count * case.nbytes
    reach = _REACH.get(case.way) if nbytes >= 64 * MIB else None
    row = Row(case.name, "bandwidth", turns[0].gb_per_s(nbytes), "GB/s")
    against_path = Row(
        case.name,
        "bandwidth",
        row.value,
        "GB/s",
        limit="at least" if reach else None,
        limit_value=reach,
    )
    rows = [versus(against_path, turns[1].name, turns[1].gb_per_s(nbytes))]
    if theirs:
        rows.append(versus(row, "mooncake store", nbytes / statistics.median(theirs) / 1e9))
    seconds = sorted(turns[0].seconds)
    p50, p99 = (
        statistics.median(seconds) * 1e3,
        seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))] * 1e3,
    )
    rows.append(Row(case.name, "latency", p50, "ms", p50=p50, p99=p99))
    return rows


class _Session:
    """A store node in another process, a client of it, and a second agent that moves the same bytes alone."""

    def __init__(self, client: StoreClient, agent: TransferAgent, node: RemoteStore) -> None:
        self._client = client
        self._agent = agent
        self._node = node

    @asynccontextmanager
    async def moves(self, case: _Case) -> AsyncIterator[tuple[Move, Move]]:
        """What moves a case through the client, and what moves the same spans without it."""
        memory = np.random.default_rng(case.nbytes).integers(0, 256, case.count * case.nbytes, np.uint8)
        names = {
            f"{case.nbytes}-{n}": memory[n * case.nbytes : (n + 1) * case.nbytes] for n in range(case.count)
        }
        await self._client.batch_put(names)
        # Both know the memory beforehand, as Mooncake does.
        with self._agent.register(memory) as region, self._client.registered(memory):
            pinned = self._reading if case.way == "get" else self._writing
            async with pinned(names, region.id, case) as path:
                yield self._ours(case.way, names), path
        await self._client.batch_remove(list(names))

    def _ours(self, way: str, names: dict[str, npt.NDArray[np.uint8]]) -> Move:
        async def move() -> float:
            began_s = time.perf_counter()
            if way == "get":
                found = await self._client.batch_get_into(names)
                assert all(found)
            else:
                await self._client.batch_put(names)
            return time.perf_counter() - began_s

        return move

    @asynccontextmanager
    async def _reading(
        self, names: dict[str, npt.NDArray[np.uint8]], region: int, case: _Case
    ) -> AsyncIterator[Move]:
        owner = self._client.tenant.owner
        theirs: list[Span] = []
        checksums: list[int] = []
        held: list[store_pb2.OpenedObject] = []
        chunk_nbytes = 1
        for name in names:
            first = 0
            while first * chunk_nbytes < case.nbytes:
                wanted = store_pb2.OpenObject(key=self._client.tenant.key(name), first_chunk=first)
                (opened,), chunk_nbytes = await self._node.open(owner, [wanted])
                held.append(opened)
                theirs += [
                    Span(r, o, chunk_nbytes)
                    for r, o in zip(opened.chunks.region, opened.chunks.offset, strict=True)
                ]
                checksums += opened.chunks.checksum
                first += len(opened.chunks.offset)
        ours = [Span(region, number * chunk_nbytes, chunk_nbytes) for number in range(len(theirs))]
        peer = await self._node.peer()

        async def move() -> float:
            began_s = time.perf_counter()
            await peer.read(ours, theirs, deadline_s=_DEADLINE_S, checksums=checksums)
            return time.perf_counter() - began_s

        yield move
        self._node.release(held)

    @asynccontextmanager
    async def _writing(
        self, names: dict[str, npt.NDArray[np.uint8]], region: int, case: _Case
    ) -> AsyncIterator[Move]:
        owner = self._client.tenant.owner
        # As large as one window is: more cannot be reserved without committing what is before it.
        infos = [
            store_pb2.ObjectInfo(key=bytes([n]) * 16, version=1, name=f"raw-{n}", nbytes=case.nbytes)
            for n in range(case.count)
        ]
        steps, chunk_nbytes = await self._node.begin(owner, infos)
        theirs = [
            Span(r, o, chunk_nbytes)
            for step in steps
            for r, o in zip(step.chunks.region, step.chunks.offset, strict=True)
        ]
        ours = [Span(region, number * chunk_nbytes, chunk_nbytes) for number in range(len(theirs))]
        data = self._agent.regions.get(region).buffer
        peer = await self._node.peer()

        async def move() -> float:
            # Who writes computes the checksums: a part of the path, here as in a put.
            began_s = time.perf_counter()
            sums = await asyncio.to_thread(
                lambda: [checksum(data[span.offset : span.offset + span.nbytes]) for span in ours]
            )
            await peer.write(ours, theirs, deadline_s=_DEADLINE_S, checksums=sums)
            return time.perf_counter() - began_s

        yield move
        await self._node.call("Abort", store_pb2.AbortRequest(put_id=[step.put_id for step in steps]))


@asynccontextmanager
async def _session() -> AsyncIterator[_Session]:
    options = TransferOptions(deadline_s=_DEADLINE_S)
    with private_redis() as url:
        node = await asyncio.create_subprocess_exec(
            *tied_command(
                [
                    *(sys.executable, "-m", "moonpool.kvstore.store_node", "--set", f"index.redis_url={url}"),
                    *("--set", "store.host.capacity_nbytes=1MiB", "--set", "node.id=store"),
                    *("--set", f"store_node.object_nbytes={2 * _LENT_NBYTES}"),
                    *("--set", f"transfer.deadline_s={_DEADLINE_S}"),
                ]
            ),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            assert node.stdout is not None
            address = json.loads(await node.stdout.readline())["rpc_address"]
            directory = IndexDirectory(url, "moonpool")
            async with (
                open_client(
                    directory, url, tenant=Tenant(), deadline_s=_DEADLINE_S, transfer=options
                ) as client,
                await TransferAgent.start(options, agent_id="alone", epoch=1) as agent,
                RemoteStore("store", address, agent, deadline_s=_DEADLINE_S) as remote,
            ):
                yield _Session(client, agent, remote)
            await directory.aclose()
        finally:
            node.terminate()
            await node.wait()
