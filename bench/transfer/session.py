"""One transport: two processes, and each shape in turn with its limit and its peers."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from moonpool.bench.harness.child import Child, served
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.peers import PeerFailed
from moonpool.bench.harness.turns import Call, compared, repeat, spread, turns
from moonpool.bench.transfer.device_memory import DeviceBuffer
from moonpool.bench.transfer.limits import DeviceCopy, MemoryCopy
from moonpool.bench.transfer.peers.contestants import Contestant, contestants
from moonpool.bench.transfer.raw_sockets import RawStream, tuned
from moonpool.bench.transfer.shapes import Shape
from moonpool.runtime.config.options import TcpOptions, TransferOptions
from moonpool.runtime.reports.report import Curve, Row, versus
from moonpool.transfer import AgentDescriptor, Peer, Region, Spans, TransferAgent, checksum
from moonpool.transfer.native.cuda import load_cuda

TURN_S = 0.1
_NOTES, _NOTES_S = 400, 60.0
_IDLE_S = 1.5


@dataclass(frozen=True, slots=True)
class Settings:
    shapes: Sequence[Shape]
    checksums: Sequence[bool]
    tcp: TcpOptions
    busy: bool
    pool_nbytes: int


def target(
    settings: Settings, path: str, *, busy: bool = False, security: dict[str, Any] | None = None
) -> AbstractAsyncContextManager[Child]:
    """The other process; see ``Target``."""
    return served(
        "the target",
        "moonpool.bench.transfer.target_child",
        "Target",
        path=path,
        pool_nbytes=settings.pool_nbytes,
        streams=settings.tcp.streams,
        slice_nbytes=settings.tcp.slice_nbytes,
        busy=busy,
        security=security,
    )


class MoonpoolSide:
    """Batches over one connected peer, verified or not; as of ``Contestant``."""

    def __init__(
        self, peer: Peer, pool: Region, remote: int, checksums: bool, cpu_s: Callable[[], float]
    ) -> None:
        """remote: the region at the peer, as large as ``pool``; both hold zeros."""
        self.name = f"checksum-{'on' if checksums else 'off'}"
        self.peer = peer
        self.cpu_s = cpu_s
        self._checksums = checksums
        self._pool = pool
        self._remote = remote
        self._pairs: list[tuple[Spans, Spans]] = []
        self._sums: list[int] | None = None
        self._direction = "read"

    async def prepare(self, shape: Shape) -> None:
        pool = self._pool
        ours, theirs = shape.spans(pool.id, pool.nbytes, 0), shape.spans(self._remote, pool.nbytes, 1)
        self._pairs = list(zip(ours, theirs, strict=True))
        self._sums = [checksum(bytes(shape.block_nbytes))] * shape.batch if self._checksums else None
        self._direction = shape.direction

    async def move(self, seconds: float) -> list[float]:
        return await repeat(self._pass, seconds)

    async def _pass(self) -> None:
        post = self.peer.read if self._direction == "read" else self.peer.write
        batches = [post(here, there, deadline_s=30, checksums=self._sums) for here, there in self._pairs]
        for batch in batches:
            await batch


async def transport_rows(run: Run, settings: Settings, *, transport: str) -> list[Row]:
    """The rows of a transport; a curve of the bandwidth against the block size."""
    pair = _Pair(run, settings, transport)
    rows = await pair.rows()
    for name, points in pair.best.items():
        run.curves.append(Curve("bandwidth", name, "block size, bytes", "GB/s", sorted(points.items())))
    return rows


class _Pair:
    """Two processes, this one and a target, connected over one transport.

    ucx uses the path that it finds best, shared memory here; ucx-tcp is limited to TCP. cuda-ipc: both have a
    pool in the memory of a GPU; cuda-shm, cuda-tcp: this one does, and the target's pool is in host memory.
    """

    def __init__(self, run: Run, settings: Settings, transport: str) -> None:
        self._run = run
        self._settings = settings
        self._transport = transport
        self._on_device = transport.startswith("cuda-")
        path = transport.removeprefix("cuda-") if transport != "cuda-ipc" else transport
        self._path = path if path == "cuda-ipc" else path.partition("-")[0]
        self._over_tcp = transport.endswith("tcp") and not self._on_device
        # GB/s by block size of each line of the picture.
        self.best: dict[str, dict[float, float]] = defaultdict(dict)

    async def rows(self) -> list[Row]:
        settings, found = self._settings, list[Row]()
        options = TransferOptions(transports=(self._path,), tcp=settings.tcp)
        if self._path == "ucx":
            os.environ["UCX_TLS"] = "tcp,self" if self._over_tcp else "all"
        async with AsyncExitStack() as stack:
            # Entered first: device memory is freed after the agents have ended.
            device = None
            if self._on_device:
                device = stack.enter_context(DeviceBuffer(load_cuda(), settings.pool_nbytes))
            agent, trusting = [
                await stack.enter_async_context(await TransferAgent.start(of, agent_id=name, epoch=1))
                for of, name in ((options, "bench"), (replace(options, checksum=False), "trusting bench"))
            ]
            other_side = await stack.enter_async_context(target(settings, self._path, busy=settings.busy))
            if self._transport != "local":
                await other_side.call("echo_to", descriptor=agent.describe().pack().decode())
            # Each agent has a pool of its own: a peer does not map memory that another agent registered.
            pool, other = [
                of.allocate(settings.pool_nbytes, "pool") if device is None else of.register(device)
                for of in (agent, trusting)
            ]
            remote = other_side.ready["region"]
            descriptor = AgentDescriptor.unpack(other_side.ready["descriptor"].encode())
            if self._transport == "local":
                other_pool = agent.allocate(pool.nbytes, "other pool")
                agent.allow_writes(other_pool)
                remote, descriptor = other_pool.id, agent.describe()

            def cpu_s() -> float:
                return time.process_time() + other_side.cpu_s()

            verified = MoonpoolSide(await agent.connect(descriptor), pool, remote, True, cpu_s)
            trusted = MoonpoolSide(await trusting.connect(descriptor), other, remote, False, cpu_s)
            raw = None
            if self._over_tcp:
                raw = stack.enter_context(closing(tuned(other_side.ready["raw_port"], pool.buffer)))
            limit = self._limit(stack, agent, pool, device, raw)
            peers: list[Contestant] = []
            if self._transport != "local":
                running = contestants(self._run.peers, self._over_tcp, pool.nbytes, self._run.say)
                peers = await stack.enter_async_context(running)
            ours = [side for side, on in ((trusted, False), (verified, True)) if on in settings.checksums]
            for shape in settings.shapes:
                self._run.say(f"{self._transport}/{shape.name}")
                found += await self._shape_rows(shape, limit, ours, peers)
            if self._transport != "local":
                found.append(await self._note_row(agent, verified.peer))
                if not settings.busy:
                    found.append(await self._idle_row(other_side))
        return found

    def _limit(
        self,
        stack: AsyncExitStack,
        agent: TransferAgent,
        pool: Region,
        device: DeviceBuffer | None,
        raw: RawStream | None,
    ) -> tuple[str, Callable[[Shape], Callable[[], float]]]:
        """Name and function that move the same blocks in the shortest way."""
        if raw is not None:
            return "raw sockets", lambda shape: lambda: raw.move(shape.nbytes, shape.direction)
        if device is None:
            # Written to, so that its pages exist.
            source = np.full(pool.nbytes, 0, np.uint8)
            return "memcpy", lambda shape: MemoryCopy(shape, pool.array, source).move
        if self._path == "cuda-ipc":
            other = stack.enter_context(DeviceBuffer(load_cuda(), pool.nbytes)).address
        else:
            other = agent.allocate(pool.nbytes, "locked").address
        return "cudaMemcpy", lambda shape: DeviceCopy(load_cuda(), shape, device, other).move

    async def _shape_rows(
        self,
        shape: Shape,
        limit: tuple[str, Callable[[Shape], Callable[[], float]]],
        ours: Sequence[MoonpoolSide],
        peers: Sequence[Contestant],
    ) -> list[Row]:
        """Our figures beside the limit; without checksums also beside the peers, which have none."""
        limit_name, limit_move = limit[0], limit[1](shape)
        cpu_s: dict[str, float] = defaultdict(float)
        contestants_: dict[str, Call] = {limit_name: lambda: repeat(limit_move, TURN_S)}
        for one in (*ours, *peers):
            await one.prepare(shape)
            contestants_[one.name] = lambda one=one: _counted(one, cpu_s)  # type: ignore[misc]
        seconds = await turns(contestants_, self._run.rounds, warm_up=0)

        def gb_per_s(median_s: float) -> float:
            return shape.nbytes / median_s / 1e9

        def cpu_s_per_gb(name: str) -> float:
            return cpu_s[name] / ((len(seconds[name]) + self._run.rounds) * shape.nbytes) * 1e9

        rows = []
        for side in ours:
            others = [limit_name, *(peer.name for peer in peers if side.name == "checksum-off")]
            case, of_side = f"{self._transport}/{shape.name}/{side.name}", seconds[side.name]
            samples = {name: seconds[name] for name in (side.name, *others)}
            bandwidths = compared(case, "bandwidth", "GB/s", samples, gb_per_s)
            rows += [*bandwidths, spread(case, "latency", of_side, "µs", 1e6)]
            rows.append(Row(case, "spans", shape.batch * shape.parallel / median(of_side), "spans/s"))
            cpu = Row(case, "processor time", cpu_s_per_gb(side.name), "s/GB")
            rows += [cpu, *(versus(cpu, name, cpu_s_per_gb(name)) for name in others if cpu_s[name] > 0)]
            if side.name == "checksum-off" and shape.scattered and shape.parallel == 1:
                self._keep_best(f"{self._transport} {shape.direction}", shape, bandwidths[0].value)
                for row in bandwidths:
                    self._keep_best(f"{self._transport} {row.peer}", shape, row.peer_value or 0.0)
        return rows

    def _keep_best(self, line: str, shape: Shape, gb_per_s: float) -> None:
        best = self.best[line]
        best[shape.block_nbytes] = max(gb_per_s, best.get(shape.block_nbytes, 0.0))

    async def _note_row(self, agent: TransferAgent, peer: Peer) -> Row:
        """Half of a round trip of 64 bytes, from one event loop to the other."""
        notes = agent.notifications()

        async def note() -> float:
            began_s = time.perf_counter()
            peer.notify(bytes(64))
            await anext(notes)
            return (time.perf_counter() - began_s) / 2

        try:
            async with asyncio.timeout(_NOTES_S):
                found = await turns({"note": note}, _NOTES, warm_up=_NOTES // 10)
        except TimeoutError:
            raise PeerFailed(f"the target did not return {_NOTES} notes within {_NOTES_S:g} s") from None
        return spread(f"{self._transport}/note/64B", "latency", found["note"], "µs", 1e6)

    async def _idle_row(self, target: Child) -> Row:
        """Two agents with nothing to do."""
        used_s = time.process_time() + target.cpu_s()
        await asyncio.sleep(_IDLE_S)
        used_s = time.process_time() + target.cpu_s() - used_s
        return Row(f"{self._transport}/idle", "processor", 100 * used_s / 2 / _IDLE_S, "% of a core")


async def _counted(contestant: Contestant | MoonpoolSide, cpu_s: dict[str, float]) -> list[float]:
    before_s = contestant.cpu_s()
    seconds = await contestant.move(TURN_S)
    cpu_s[contestant.name] += contestant.cpu_s() - before_s
    return seconds
