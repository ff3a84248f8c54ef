"""A cluster that histories are played on, and what goes wrong in it meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.kvstore.redis_servers import Server
from tests.objects.linearizability import PENDING, Operation
from tests.store_node.conftest import StoreCluster

CLOCK_OFFSETS_S = (0.0, -3600.0, 3600.0)
NODES = ("a", "b", "c")


class CutLine:
    """A node's way to Redis, which can be cut: nothing arrives any more, and nobody is told."""

    def __init__(self, path: Path, target: Path) -> None:
        self.url = f"unix://{path}"
        self._path, self._target = path, target
        self._open = asyncio.Event()
        self._open.set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    async def close(self) -> None:
        self.mend()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._open.wait()
            back, there = await asyncio.open_unix_connection(str(self._target))
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass_on(reader, there), self._pass_on(back, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class Play:
    """Histories on a cluster of three nodes with disks, by clients whose clocks differ. ``start`` some, have
    things go wrong, and take what came of them from ``histories``."""

    def __init__(self, cluster: StoreCluster, redis: Server, lines: dict[str, CutLine]) -> None:
        self.cluster = cluster
        self.redis = redis
        self.lines = lines
        self.histories: dict[int, dict[int, list[Operation]]] = {}  # by number and key
        self.errors: list[str] = []
        self.faults: list[str] = []
        self._parts: dict[int, int] = {}  # that are missing
        self._started = 0
        self._moved = asyncio.Event()
        self._clients: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []

    async def open(self, deadline_s: float) -> None:
        await asyncio.gather(*(self._start(name) for name in NODES))
        for number, offset_s in enumerate(CLOCK_OFFSETS_S):
            # In the clients' own way: they are not cut off when nodes are.
            command = ["-m", "tests.objects.client_process", self.redis.url, str(offset_s), str(number)]
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, *command, str(deadline_s)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert client.stdout is not None
            assert await client.stdout.readline() == b"ready\n"
            self._clients.append(client)
            self._readers.append(asyncio.create_task(self._read(client)))

    async def _start(self, name: str) -> None:
        await self.cluster.start(
            name,
            index__redis_url=self.lines[name].url,
            store__ssd__path=self.cluster.directory / "disk",
            transfer__deadline_s=2.0,
        )

    async def close(self) -> None:
        for client in self._clients:
            assert client.stdin is not None
            if self._parts:
                client.kill()
            client.stdin.close()
        await asyncio.gather(*(client.wait() for client in self._clients), *self._readers)

    async def _read(self, client: asyncio.subprocess.Process) -> None:
        assert client.stdout is not None
        while line := await client.stdout.readline():
            number, done, errors = json.loads(line)
            self.errors += errors
            for key, kind, value, called_s, ended_s in done:
                operation = Operation(kind, value, called_s, PENDING if ended_s is None else ended_s)
                self.histories.setdefault(number, {}).setdefault(key, []).append(operation)
            self._parts[number] -= 1
            if not self._parts[number]:
                del self._parts[number]
            self._moved.set()

    async def play(self, count: int, at_once: int) -> None:
        """Play so many histories more, some at a time."""
        for _ in range(count):
            await self._until_running(at_once - 1)
            number = self._started = self._started + 1
            self._parts[number] = len(self._clients)
            for client in self._clients:
                assert client.stdin is not None
                client.stdin.write(b"%d\n" % number)
        await self._until_running(0)

    async def _until_running(self, most: int) -> None:
        while len(self._parts) > most:
            self._moved.clear()
            await self._moved.wait()

    async def _until_ended(self) -> None:
        """Until all histories that run now have ended."""
        running = set(self._parts)
        while running & self._parts.keys():
            self._moved.clear()
            await asyncio.wait_for(self._moved.wait(), 120)

    # ------------------------------------------------------------------ faults

    async def trouble(self, rng: random.Random) -> None:
        """One kill after the other, and beside them one other fault after the other, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for faults in ((self.kill,), (self.stop, self.cut_off, self.restart_redis, self.stop_redis)):
                group.create_task(self._one_after_the_other(rng, faults))

    async def _one_after_the_other(
        self, rng: random.Random, faults: Sequence[Callable[[random.Random], Awaitable[None]]]
    ) -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            await rng.choice(faults)(rng)

    async def kill(self, rng: random.Random) -> None:
        name = rng.choice(NODES)
        self.faults.append(f"kill {name}")
        await self.cluster.kill(name)
        await asyncio.sleep(rng.uniform(0, 0.5))
        await self._start(name)
        # Two copies survive one loss. The next is of objects that were not under way.
        await self._until_ended()

    async def stop(self, rng: random.Random) -> None:
        name = rng.choice(NODES)
        self.faults.append(f"stop {name}")
        process = self.cluster.nodes[name].pid
        with suppress(ProcessLookupError):  # it may be killed meanwhile, too
            os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.1, 1.5))
            os.kill(process, signal.SIGCONT)

    async def cut_off(self, rng: random.Random) -> None:
        name = rng.choice(NODES)
        self.faults.append(f"cut off {name}")
        self.lines[name].cut()
        await asyncio.sleep(rng.uniform(0.1, 1.5))
        self.lines[name].mend()

    async def restart_redis(self, rng: random.Random) -> None:
        self.faults.append("restart redis")
        await self.redis.kill()
        await asyncio.sleep(rng.uniform(0, 0.3))
        await self.redis.start()

    async def stop_redis(self, rng: random.Random) -> None:
        self.faults.append("stop redis")
        assert self.redis.process is not None
        self.redis.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(0.1, 0.6))
        self.redis.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def played(directory: Path, deadline_s: float = 1.0) -> AsyncIterator[Play]:
    """A cluster with a Redis that keeps its data, and clients that wait for histories."""
    redis = Server(directory, "--appendonly", "yes")
    await redis.start()
    lines = {name: CutLine(directory / f"{name}.sock", redis.path) for name in NODES}
    await asyncio.gather(*(line.start() for line in lines.values()))
    cluster = StoreCluster(directory, redis)
    play = Play(cluster, redis, lines)
    try:
        await play.open(deadline_s)
        yield play
    finally:
        await play.close()
        for child in cluster.nodes.values():
            child.kill()
            await child.wait()
        for line in lines.values():
            await line.close()
        await redis.kill()
