"""One run: for each transport two processes, and every case in turn with its limit and its peers."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moonpool.bench.transfer.batch_shape import Shape
from moonpool.bench.transfer.device_memory import DeviceBuffer, DeviceCopy
from moonpool.bench.transfer.goals import IDLE_PERCENT, NOTE_P50_US
from moonpool.bench.transfer.memory_limit import MemoryCopy
from moonpool.bench.transfer.moonpool_side import CpuClock, Ours
from moonpool.bench.transfer.peers.contestant import contestants, require
from moonpool.bench.transfer.raw_sockets import RawStream, tuned
from moonpool.bench.transfer.samples import rows_of, take_turns
from moonpool.runtime.config.options import TcpOptions, TransferOptions
from moonpool.runtime.reports.report import Row
from moonpool.transfer import AgentDescriptor, Peer, Region, TransferAgent
from moonpool.transfer.native.cuda import load_cuda

ROOT = Path(__file__).parents[3]
_NOTES = 400
_IDLE_S = 1.5


@dataclass(frozen=True, slots=True)
class Settings:
    transports: Sequence[str]
    shapes: Sequence[Shape]
    checksums: Sequence[bool]
    rounds: int
    tcp: TcpOptions
    busy: bool
    pool_nbytes: int
    peers: tuple[str, ...] = ()


async def measure(settings: Settings, say: Callable[[str], None]) -> list[Row]:
    """Raises PeerAbsent before anything is measured, and PeerFailed."""
    require(settings.peers)
    rows: list[Row] = []
    for transport in settings.transports:
        rows += await _Pair(settings, transport, say).run()
    return rows


class _Pair:
    """Two processes, this and a target, connected over one transport.

    ucx takes the transport it finds best, shared memory here; ucx-tcp is made to take TCP. cuda-ipc: both
    have a pool in the memory of a GPU; cuda-shm, cuda-tcp: this has one there, the target in the host's.
    """

    def __init__(self, settings: Settings, transport: str, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._transport = transport
        self._on_device = transport.startswith("cuda-")
        path = transport.removeprefix("cuda-") if transport != "cuda-ipc" else transport
        self._path = path if path == "cuda-ipc" else path.partition("-")[0]
        self._over_tcp = transport.endswith("tcp") and not self._on_device
        self._say = say

    async def run(self) -> list[Row]:
        tcp = self._settings.tcp
        options = TransferOptions(transports=(self._path,), tcp=tcp)
        if self._path == "ucx":
            os.environ["UCX_TLS"] = "tcp,self" if self._over_tcp else "all"
        async with (
            # Device memory goes after the agents.
            AsyncExitStack() as owned,
            await TransferAgent.start(options, agent_id="bench", epoch=1) as agent,
            await TransferAgent.start(
                replace(options, checksum=False), agent_id="trusting bench", epoch=1
            ) as trusting,
        ):
            numbers = (self._settings.pool_nbytes, tcp.streams, tcp.slice_nbytes)
            busy = "busy" if self._settings.busy else "idle"
            target = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "moonpool.bench.transfer.target_child",
                    self._path,
                    *map(str, numbers),
                    busy,
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
            )
            try:
                return await self._with_target(agent, trusting, target, owned)
            finally:
                if target.returncode is None:
                    target.kill()
                await target.wait()

    async def _with_target(
        self,
        agent: TransferAgent,
        trusting: TransferAgent,
        target: asyncio.subprocess.Process,
        owned: AsyncExitStack,
    ) -> list[Row]:
        settings = self._settings
        assert target.stdin is not None
        assert target.stdout is not None
        facts = json.loads(await target.stdout.readline())
        target.stdin.write(agent.describe().pack() + b"\n")
        device: DeviceBuffer | None = None
        if self._on_device:
            device = owned.enter_context(DeviceBuffer(load_cuda(), settings.pool_nbytes))
            pool = agent.register(device)
        else:
            pool = agent.allocate(settings.pool_nbytes, "pool")
        remote, descriptor = facts["region"], AgentDescriptor.unpack(facts["descriptor"].encode())
        if self._transport == "local":
            remote, descriptor = agent.allocate(pool.nbytes, "other pool").id, agent.describe()
        cpu = CpuClock(target.pid)
        verified = Ours(await agent.connect(descriptor), pool, remote, True, cpu)
        # A pool of its own: registered memory of another agent is not what peers map.
        own = trusting.allocate(pool.nbytes, "pool") if device is None else trusting.register(device)
        trusted = Ours(await trusting.connect(descriptor), own, remote, False, cpu)
        ours = [one for one in (trusted, verified) if one.checksums in settings.checksums]
        raw = tuned(facts["raw_port"], pool.buffer) if self._over_tcp else None
        limit_of, limit_name = self._limit(agent, pool, device, raw, owned)
        rows: list[Row] = []
        async with AsyncExitStack() as stack:
            peers = []
            if self._transport != "local":
                running = contestants(settings.peers, self._over_tcp, pool.nbytes, self._say)
                peers = await stack.enter_async_context(running)
            for shape in settings.shapes:
                self._say(f"{self._transport}/{shape.name}")
                of_limit, of_each = await take_turns(
                    shape, limit_of(shape), limit_name, [*ours, *peers], settings.rounds
                )
                for one, samples in zip(ours, of_each, strict=False):
                    of_peers = of_each[len(ours) :]
                    rows += rows_of(self._transport, shape, one.checksums, samples, of_limit, of_peers)
        if raw is not None:
            raw.close()
        if self._transport != "local":
            rows += await self._notes(agent, verified.peer)
            rows += await self._idle(cpu)
        return rows

    def _limit(
        self,
        agent: TransferAgent,
        pool: Region,
        device: DeviceBuffer | None,
        raw: RawStream | None,
        owned: AsyncExitStack,
    ) -> tuple[Callable[[Shape], Callable[[], float]], str]:
        """What moves the same blocks by the shortest way, and its name."""
        if raw is not None:
            return functools.partial(_raw_move, raw), "raw sockets"
        if device is None:
            # Written to, so that it is memory.
            source = np.full(pool.nbytes, 0, np.uint8)
            return lambda shape: MemoryCopy(shape, pool.array, source).move, "memcpy"
        if self._path == "cuda-ipc":
            other = owned.enter_context(DeviceBuffer(load_cuda(), pool.nbytes)).address
        else:
            other = agent.allocate(pool.nbytes, "locked").address
        return lambda shape: DeviceCopy(load_cuda(), shape, device, other).move, "cudaMemcpy"

    async def _notes(self, agent: TransferAgent, peer: Peer) -> list[Row]:
        """Half of a round trip of 64 bytes, from one event loop to the other."""
        notes = agent.notifications()
        halves = []
        for turn in range(_NOTES):
            started = time.perf_counter()
            peer.notify(bytes(64))
            await anext(notes)
            if turn >= _NOTES // 10:
                halves.append((time.perf_counter() - started) / 2 * 1e6)
        halves.sort()
        p50, p99 = statistics.median(halves), halves[int(len(halves) * 0.99)]
        return [Row(f"{self._transport}/note/64B", "latency", p50, "µs", p50, p99, "at most", NOTE_P50_US)]

    async def _idle(self, cpu: CpuClock) -> list[Row]:
        """Two agents with nothing to do."""
        if self._settings.busy:
            return []
        used = cpu.seconds()
        await asyncio.sleep(_IDLE_S)
        share = (cpu.seconds() - used) / 2 / _IDLE_S * 100
        return [
            Row(
                f"{self._transport}/idle",
                "processor",
                share,
                "% of a core",
                limit="at most",
                limit_value=IDLE_PERCENT,
            )
        ]


def _raw_move(raw: RawStream, shape: Shape) -> Callable[[], float]:
    return lambda: raw.move(shape.nbytes, shape.direction)
