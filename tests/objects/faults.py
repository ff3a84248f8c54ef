"""A cluster that histories are played on, and what goes wrong in it meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from moonpool.runtime.errors import ChildFailed
from tests.kvstore.redis_servers import Server
from tests.objects.linearizability import PENDING, Operation
from tests.objects.network import Network
from tests.store_node.conftest import StoreCluster

CLOCK_OFFSETS_S = (0.0, -3600.0, 3600.0)
CLIENTS = tuple(f"client{number}" for number in range(len(CLOCK_OFFSETS_S)))
NODES = ("a", "b", "c")
REDIS = "redis"
REDIS_PORT = 6379  # in a network of its own
# Nodes do not listen to other machines without one.
KEY = "histories-of-objects"
STARTS = 5
WAYS = [
    *((client, node) for client in CLIENTS for node in NODES),
    *((node, REDIS) for node in NODES),
    *((client, REDIS) for client in CLIENTS),
    *itertools.combinations(NODES, 2),
]
# Some are longer than a node's lease of 2 s.
CUT_S = (0.1, 2.5)


class Play:
    """Histories on a cluster of three nodes with disks, by clients whose clocks differ; Redis, nodes and
    clients have a network namespace each. ``play`` some, have things go wrong, and take what came of them
    from ``histories``."""

    def __init__(self, cluster: StoreCluster, redis: Server, network: Network) -> None:
        self.cluster = cluster
        self.redis = redis
        self.network = network
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
        # The key of calls, where a user's processes look for it.
        key = self.cluster.directory / "moonpool" / "cluster_key"
        key.parent.mkdir()
        key.write_text(KEY)
        for number, (name, offset_s) in enumerate(zip(CLIENTS, CLOCK_OFFSETS_S, strict=True)):
            command = [*self.network.within(name), sys.executable, "-m", "tests.objects.client_process"]
            arguments = (self.cluster.url, offset_s, number, deadline_s, self.network.address(name))
            client = await asyncio.create_subprocess_exec(
                *(*command, *map(str, arguments)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"XDG_STATE_HOME": str(self.cluster.directory)},
            )
            assert client.stdout is not None
            assert await client.stdout.readline() == b"ready\n"
            self._clients.append(client)
            self._readers.append(asyncio.create_task(self._read(client)))

    async def _start(self, name: str) -> None:
        """Start a node; again, as its supervisor would, if it ends because Redis cannot be reached."""
        host = self.network.address(name)
        for left in reversed(range(STARTS)):
            try:
                await self.cluster.start(
                    name,
                    node__host=host,
                    security__cluster_key=KEY,
                    store__ssd__path=self.cluster.directory / "disk",
                    transfer__deadline_s=2.0,
                    transfer__tcp__host=host,
                    # No other: they would go around the network.
                    transfer__transports="tcp",
                )
                return
            except ChildFailed:
                if not left:
                    raise

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
        """One kill after the other, beside them one process after the other that stands still, and beside
        those one cut in the network after the other; until cancelled."""
        async with asyncio.TaskGroup() as group:
            standing_still = (self.stop, self.restart_redis, self.stop_redis)
            for faults in ((self.kill,), standing_still, (self.cut,)):
                group.create_task(self._one_after_the_other(rng, faults))

    async def _one_after_the_other(
        self, rng: random.Random, faults: Sequence[Callable[[random.Random], Awaitable[None]]]
    ) -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            await rng.choice(faults)(rng)

    async def kill(self, rng: random.Random) -> None:
        name = rng.choice(NODES)
        node = self.cluster.nodes[name]
        if node.returncode is not None:
            raise node.failure(f"ended by itself with code {node.returncode}")
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

    async def cut(self, rng: random.Random) -> None:
        """The way between two parties, or all ways of one; mostly in both directions."""
        if rng.random() < 0.3:
            one, other = rng.choice((REDIS, *NODES, *CLIENTS)), ""
        else:
            one, other = rng.choice(WAYS)
        ways = [(one, other), (other, one)]
        if rng.random() < 0.3:
            ways = [rng.choice(ways)]
        cuts = (f"{receiver or 'all'} from {sender or 'all'}" for sender, receiver in ways)
        self.faults.append(f"cut {' and '.join(cuts)}")
        for way in ways:
            self.network.cut(*way)
        await asyncio.sleep(rng.uniform(*CUT_S))
        for way in ways:
            self.network.mend(*way)

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
    network = Network((REDIS, *NODES, *CLIENTS))
    host = network.address(REDIS)
    listens = ("--bind", host, "--port", str(REDIS_PORT), "--protected-mode", "no")
    # By default Redis acknowledges up to two seconds of changes before it writes them, if the disk is slow.
    keeps = ("--appendonly", "yes", "--appendfsync", "always")
    redis = Server(directory, *keeps, *listens, within=network.within(REDIS))
    cluster = StoreCluster(directory, redis, network.path)
    cluster.url = f"redis://{host}:{REDIS_PORT}"
    play = Play(cluster, redis, network)
    try:
        await redis.start()
        await play.open(deadline_s)
        yield play
    finally:
        await play.close()
        for child in cluster.nodes.values():
            child.kill()
            await child.wait()
        await redis.kill()
        network.close()
