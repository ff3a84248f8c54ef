"""What some drills need beside a cluster: a second conductor behind a link, a node with a GPU's stand-in."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from moonpool.client import Client
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.child import Child
from moonpool.runtime.service.vital import cancel_and_wait

GPU_NODE = "gpu-0"
_READY_S = 120.0
_STOP_S = 10.0


class Link:
    """A port of this host that leads to a Unix socket. Cut, it carries nothing and refuses nothing, as a
    network that drops packets: what was sent arrives when it is joined again."""

    def __init__(self, socket: Path) -> None:
        self.port = 0
        self._socket = socket
        self._joined = asyncio.Event()
        self._joined.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._joined.clear()

    def join(self) -> None:
        self._joined.set()

    @classmethod
    @asynccontextmanager
    async def to(cls, socket: Path) -> AsyncIterator[Link]:
        link = cls(socket)
        server = await asyncio.start_server(link._serve, "127.0.0.1", 0)
        link.port = server.sockets[0].getsockname()[1]
        try:
            yield link
        finally:
            server.close()
            await cancel_and_wait(*link._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_unix_connection(str(self._socket))
        for source, target in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.create_task(self._carry(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                await self._joined.wait()
                target.write(data)
                await target.drain()
        target.close()


@asynccontextmanager
async def second_conductor(cluster: LocalCluster, link: Link) -> AsyncIterator[str]:
    """Yield the URL of one that reaches Redis through ``link`` only, and sees every node."""
    redis = f"index.redis_url=redis://127.0.0.1:{link.port}"
    child = _child(cluster, "conductor-1", "moonpool.conductor", redis, "conductor.leave_s=0")
    async with _running(child):
        url = str(child.ready["url"])
        await _sees(url, {node.name for node in cluster.nodes})
        yield url


@asynccontextmanager
async def gpu_node(cluster: LocalCluster) -> AsyncIterator[Child]:
    """Yield a decode node of the cluster on the stand-in; see ``lose_gpu``."""
    options = (f"node.id={GPU_NODE}", "health.interval_s=0.5", "health.bad_readings=1")
    child = _child(cluster, GPU_NODE, "moonpool.bench.drill.gpu_stand_in", *options)
    async with _running(child):
        await _sees(cluster.url, {GPU_NODE, *(node.name for node in cluster.nodes)})
        yield child


def lose_gpu(node: Child) -> None:
    """From now on NVML says that the GPU is lost, and no step runs on it."""
    os.kill(int(node.ready["pid"]), signal.SIGUSR2)


def _child(cluster: LocalCluster, name: str, module: str, *options: str) -> Child:
    command = [sys.executable, "-m", module, "--config", str(cluster.directory / "cluster.toml")]
    for option in ("node.port=0", "node.metrics_port=0", *options):
        command += ["--set", option]
    environment = {"OMP_NUM_THREADS": str(cluster.config.engine.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return Child(name, command, cluster.directory / f"{name}.log", environment=environment, sends_json=True)


@asynccontextmanager
async def _running(child: Child) -> AsyncIterator[None]:
    await child.start()
    try:
        await child.wait_ready(_READY_S)
        yield
    finally:
        await child.stop(_STOP_S)


async def _sees(url: str, names: set[str]) -> None:
    """Wait until the conductor there has every node ready."""
    async with asyncio.timeout(_READY_S), Client(url) as client:
        while names - await _ready(client):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _ready(client: Client) -> set[str]:
    return {node["node_id"] for node in (await client.cluster())["nodes"] if node["state"] == "ready"}
