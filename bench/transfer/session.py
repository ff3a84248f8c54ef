"""One run of the benchmark: every case in turn with its limit and its peers, round after round, medians of
all.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil

from bench.report import Row
from bench.transfer.memory_limit import MemoryCopy
from bench.transfer.raw_stream import RawStream, tuned
from bench.transfer.shape import Shape
from runtime.options import TcpOptions, TransferOptions
from transfer import AgentDescriptor, Peer, Region, TransferAgent, checksum

ROOT = Path(__file__).parents[2]
_ROUND_S = 0.25
_NOTES = 400
_IDLE_S = 1.5
# What the ratio to the limit should reach: (transport, block, batch, direction) -> (checksum off, on).
REACH = {
    ("shm", "1MiB/64/read"): (0.95, 0.6),
    ("shm", "4MiB/64/read"): (0.95, 0.6),
    ("shm", "64KiB/1024/read"): (0.85, 0.55),
    ("tcp", "1MiB/64/read"): (0.95, 0.6),
    ("tcp", "1MiB/64/write"): (0.95, 0.6),
    ("ucx", "1MiB/64/read"): (0.85, 0.55),
    ("ucx", "64KiB/1024/read"): (0.7, 0.45),
    ("ucx-tcp", "1MiB/64/read"): (0.7, 0.45),
}
_MIN_SPANS_A_SECOND = {("shm", 4096): 300_000.0, ("ucx", 4096): 300_000.0}


@dataclass(frozen=True, slots=True)
class Settings:
    transports: Sequence[str]
    shapes: Sequence[Shape]
    checksums: Sequence[bool]
    rounds: int
    tcp: TcpOptions
    busy: bool
    pool_nbytes: int


@dataclass(slots=True)
class _Samples:
    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    nbytes: int = 0


class _End:
    """A connected peer and our pool, registered with the agent that is connected."""

    def __init__(self, peer: Peer, pool: Region) -> None:
        self.peer = peer
        self._pool = pool

    def mover(self, shape: Shape, remote: int, checksums: bool) -> Callable[[], Awaitable[float]]:
        """A function that moves all parallel batches of ``shape`` and returns the seconds that took."""
        pool = self._pool
        ours, theirs = shape.spans(pool.id, pool.nbytes, 0), shape.spans(remote, pool.nbytes, 1)
        sums = [checksum(bytes(shape.block_nbytes))] * shape.batch if checksums else None
        post = self.peer.read if shape.direction == "read" else self.peer.write

        async def move() -> float:
            started = time.perf_counter()
            batches = [
                post(here, there, deadline_s=30, checksums=sums)
                for here, there in zip(ours, theirs, strict=True)
            ]
            for batch in batches:
                await batch
            return time.perf_counter() - started

        return move


async def measure(settings: Settings, say: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for transport in settings.transports:
        rows += await _Pair(settings, transport, say).run()
    return rows


class _Pair:
    """Two processes, this and a target, connected over one transport.

    ucx takes the transport it finds best, shared memory here; ucx-tcp is made to take TCP.
    """

    def __init__(self, settings: Settings, transport: str, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._transport = transport
        self._path = transport.partition("-")[0]
        self._over_tcp = transport.endswith("tcp")
        self._say = say

    async def run(self) -> list[Row]:
        tcp = self._settings.tcp
        options = TransferOptions(transports=(self._path,), tcp=tcp)
        if self._path == "ucx":
            os.environ["UCX_TLS"] = "tcp,self" if self._over_tcp else "all"
        async with (
            await TransferAgent.start(options, agent_id="bench", epoch=1) as agent,
            await TransferAgent.start(
                replace(options, checksum=False), agent_id="trusting bench", epoch=1
            ) as trusting,
        ):
            numbers = (self._settings.pool_nbytes, tcp.streams, tcp.slice_nbytes)
            busy = "busy" if self._settings.busy else "idle"
            target = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.transfer.target", self._path, *map(str, numbers), busy),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
            )
            try:
                return await self._with_target(agent, trusting, target)
            finally:
                if target.returncode is None:
                    target.kill()
                await target.wait()

    async def _with_target(
        self, agent: TransferAgent, trusting: TransferAgent, target: asyncio.subprocess.Process
    ) -> list[Row]:
        assert target.stdin is not None
        assert target.stdout is not None
        facts = json.loads(await target.stdout.readline())
        target.stdin.write(agent.describe().pack() + b"\n")
        pool = agent.allocate(self._settings.pool_nbytes, "pool")
        remote, descriptor = facts["region"], AgentDescriptor.unpack(facts["descriptor"].encode())
        if self._transport == "local":
            remote, descriptor = agent.allocate(pool.nbytes, "other pool").id, agent.describe()
        ends = {
            True: _End(await agent.connect(descriptor), pool),
            False: _End(await trusting.connect(descriptor), trusting.register(pool.array)),
        }
        cpu = _CpuClock(target.pid)
        raw = tuned(facts["raw_port"], pool.buffer) if self._over_tcp else None
        # Written to, so that it is memory, and zero like the pools, so that one checksum fits every block.
        source = np.full(pool.nbytes if raw is None else 1, 0, np.uint8)
        rows: list[Row] = []
        for shape in self._settings.shapes:
            self._say(f"{self._transport}/{shape.name}")
            limit = MemoryCopy(shape, pool.array, source).move if raw is None else _raw_move(raw, shape)
            rows += await self._case(ends, remote, shape, limit, cpu)
        if raw is not None:
            raw.close()
        if self._transport != "local":
            rows += await self._notes(agent, ends[True].peer)
            rows += await self._idle(cpu)
        return rows

    async def _case(
        self,
        ends: dict[bool, _End],
        remote: int,
        shape: Shape,
        limit: Callable[[], float],
        cpu: _CpuClock,
    ) -> list[Row]:
        samples = {on: _Samples() for on in self._settings.checksums}
        movers = {on: ends[on].mover(shape, remote, on) for on in samples}
        limits: list[float] = []
        for _ in range(self._settings.rounds):
            until = time.perf_counter() + _ROUND_S / (1 + len(samples))
            while True:
                limits.append(limit())
                if time.perf_counter() > until:
                    break
            for on, sample in samples.items():
                used = cpu.seconds()
                until = time.perf_counter() + _ROUND_S / (1 + len(samples))
                while True:
                    sample.seconds.append(await movers[on]())
                    sample.nbytes += shape.nbytes
                    if time.perf_counter() > until:
                        break
                sample.cpu_s += cpu.seconds() - used
        limit_name = "raw sockets" if self._over_tcp else "memcpy"
        return [
            row
            for on, sample in samples.items()
            for row in self._rows(shape, on, sample, limit_name, statistics.median(limits))
        ]

    def _rows(self, shape: Shape, on: bool, sample: _Samples, limit_name: str, limit_s: float) -> list[Row]:
        case = f"{self._transport}/{shape.name}/checksum-{'on' if on else 'off'}"
        seconds = sorted(sample.seconds)
        median = statistics.median(seconds)
        reach = REACH.get((self._transport, shape.name))
        bandwidth, limit = shape.nbytes / median / 1e9, shape.nbytes / limit_s / 1e9
        rows = [
            Row(
                case=case,
                metric="bandwidth",
                value=bandwidth,
                unit="GB/s",
                limit="at least" if reach else None,
                limit_value=reach[on] if reach else None,
                ratio=bandwidth / limit,
                peer=limit_name,
                peer_value=limit,
            ),
            Row(
                case=case,
                metric="latency",
                value=median * 1e6,
                unit="µs",
                p50=median * 1e6,
                p99=seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))] * 1e6,
            ),
        ]
        if shape.batch > 1:
            rate = shape.batch * shape.parallel / median
            floor = _MIN_SPANS_A_SECOND.get((self._transport, shape.block_nbytes))
            rows.append(
                Row(case, "spans", rate, "spans/s", limit="at least" if floor else None, limit_value=floor)
            )
            rows.append(Row(case, "processor time", sample.cpu_s / sample.nbytes * 1e9, "s/GB"))
        return rows

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
        return [Row(f"{self._transport}/note/64B", "latency", p50, "µs", p50, p99, "at most", 120.0)]

    async def _idle(self, cpu: _CpuClock) -> list[Row]:
        """Two agents with nothing to do."""
        if self._settings.busy:
            return []
        used = cpu.seconds()
        await asyncio.sleep(_IDLE_S)
        share = (cpu.seconds() - used) / 2 / _IDLE_S * 100
        return [Row(f"{self._transport}/idle", "processor", share, "% of a core", None, None, "at most", 1.0)]


def _raw_move(raw: RawStream, shape: Shape) -> Callable[[], float]:
    return lambda: raw.move(shape.nbytes, shape.direction)


class _CpuClock:
    """Processor seconds of this process and the target together."""

    def __init__(self, target_pid: int) -> None:
        self._target = psutil.Process(target_pid)

    def seconds(self) -> float:
        times = self._target.cpu_times()
        return time.process_time() + float(times.user + times.system)
