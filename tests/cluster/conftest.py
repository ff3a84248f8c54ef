"""A real cluster: Redis, conductor, two prefill and two decode nodes as processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config
from moonpool.runtime.security import process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from moonpool.runtime.service.child import Child


def small_config() -> Config:
    """Like the default one, with small pools and nothing on a fixed port. A node that a busy machine or disk
    stops for two seconds keeps its lease, and a request that it slows down its time."""
    config = Config()
    return replace(
        config,
        conductor=replace(config.conductor, port=0, request_timeout_s=240.0),
        engine=replace(config.engine, pool_nbytes=64 << 20),
        index=replace(config.index, lease_ttl_s=5.0),
    )


def with_models(directory: Path, models: str) -> Config:
    """``small_config``, for a cluster of one node of each of the models of a file, ``models``."""
    (directory / "models.toml").write_text(models)
    config = small_config()
    return replace(
        config,
        cluster=replace(config.cluster, prefill=0, decode=0, both=1),
        models=replace(config.models, path=str(directory / "models.toml")),
    )


async def eventually(holds: Callable[[], Awaitable[object]], *, timeout_s: float = 120.0) -> None:
    """Wait until ``holds()`` is true; fails with what it last answered."""
    answer: object = None
    try:
        async with asyncio.timeout(timeout_s):
            # The state is in other processes: it can only be asked for.
            while not (answer := await holds()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not within {timeout_s:g} s: {holds.__name__}, last {answer!r}")


def kill(cluster: LocalCluster, name: str) -> None:
    """kill -9, for real."""
    os.kill(cluster.children[name].pid, signal.SIGKILL)


async def nodes(client: Client) -> dict[str, dict[str, Any]]:
    """What the conductor says of each node, by its id."""
    return {node["node_id"]: node for node in (await client.cluster())["nodes"]}


async def all_ready(cluster: LocalCluster, client: Client) -> bool:
    """Every node is there, in its present life."""
    there = await nodes(client)
    return all(
        child.name in there
        and there[child.name]["state"] == "ready"
        and there[child.name]["pid"] == child.ready["pid"]
        for child in cluster.nodes
    )


async def migrate(client: Client, request_id: str, target: str = "") -> list[dict[str, Any]]:
    """Move a running request; returns its move. On a busy machine the last blocks may take too long, and the
    request goes on where it was: then once more."""
    while True:
        try:
            moves: list[dict[str, Any]] = (await client.migrate(request_id, target))["moves"]
            return moves
        except ApiError as error:
            if "the source goes on" not in str(error):
                raise


def has_ended(error: ApiError) -> bool:
    """Whether a move was refused because its request ended before it began, or while it ran."""
    return any(words in str(error) for words in ("no request of this id runs here", "the attempt has ended"))


async def complete_and_move(
    client: Client, prompt: str, num_moves: int, **parameters: Any
) -> tuple[Reply, list[dict[str, Any]]]:
    """A whole answer, and the moves of its request, one after every fifth piece. On a busy machine the nodes
    may be done before this process has read so far: then another request."""
    for _ in range(5):
        reply, moves, runs = Reply(), list[dict[str, Any]](), True
        async for _ in client.complete(prompt, reply, **parameters):
            if runs and len(moves) < num_moves and len(reply.pieces_s) >= 5 * (len(moves) + 1):
                try:
                    moves += await migrate(client, reply.id)
                except ApiError as error:
                    runs = not has_ended(error)
                    if runs:
                        raise
        if len(moves) == num_moves:
            return reply, moves
    pytest.fail(f"five times the request had ended before it had moved {num_moves} times")


def another(cluster: LocalCluster, name: str, role: str, *options: str) -> Child:
    """One more process of ``cluster``, not started: a node of a role, or a conductor."""
    modules = {"conductor": ["moonpool.conductor"], "store": ["moonpool.kvstore.store_node"]}
    module = modules.get(role, ["moonpool.node", "--role", role])
    command = [sys.executable, "-m", *module, "--config", str(cluster.directory / "cluster.toml")]
    own = ("conductor.port=0",) if role == "conductor" else (f"node.id={name}", "node.port=0")
    for option in (*own, "node.metrics_port=0", *options):
        command += ["--set", option]
    return Child(name, command, cluster.directory / f"{name}.log", sends_json=True)


def channel_as(role: str, cluster: LocalCluster, address: str) -> grpc.aio.Channel:
    """A channel to a process of ``cluster``, of a caller of that role."""
    before = process.current()
    process.use(Security(cluster.config.security, Caller(role, "a test"), serves=False))
    try:
        return rpc.channel(address)
    finally:
        process.use(before)


@asynccontextmanager
async def started(*children: Child) -> AsyncIterator[None]:
    """All of them ready inside, and ended after."""
    await asyncio.gather(*(child.start() for child in children))
    try:
        await asyncio.gather(*(child.wait_ready(120) for child in children))
        yield
    finally:
        await asyncio.gather(*(child.stop(10) for child in children))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("cluster")
    async with LocalCluster(small_config(), directory=directory) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    """A module that breaks it says that it is its ``own_cluster``."""
    return shared_cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    async with Client(cluster.url) as connected:
        yield connected


# A cluster in a process of its own: what it started ends with it, and this one is only a driver.
_RAY_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
small = dict(num_cpus=2, object_store_memory=80 << 20)
cluster = Cluster(initialize_head=True, head_node_args=dict(small, include_dashboard=False, num_cpus=0))
raylets = [cluster.add_node(**small) for _ in range(2)]
print(cluster.address, *(one.all_processes["raylet"][0].process.pid for one in raylets), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def raylets() -> Iterator[tuple[str, list[int]]]:
    """Its address, and the processes of the two raylets that have room for nodes."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", _RAY_CLUSTER]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address, *pids = process.stdout.readline().split()
        yield address, [int(pid) for pid in pids]
        process.communicate(timeout=120)
