"""Checks before a local cluster starts its first process."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

from redis.exceptions import RedisClusterException, RedisError

from moonpool.errors import IndexUnreachable, TooLittleMemory
from moonpool.kvstore.errors import StoreError
from moonpool.kvstore.index.redis.client import connect
from moonpool.local.node_configs import pools_nbytes
from moonpool.runtime.config.model_directory import ModelMissing, read_model_config
from moonpool.runtime.config.options import Config
from moonpool.runtime.health.host import HostWatch
from moonpool.runtime.machine.gpus import computes_on_gpus
from moonpool.runtime.network.sockets import check_free, no_listener

_REDIS_S = 5.0


async def check_before_start(config: Config) -> None:
    """Raise a ``MoonpoolError`` for the first problem that would keep a local cluster from starting."""
    check_model(config.model.directory)
    check_port(config.conductor.host, config.conductor.port)
    if config.fleet.provider != "ray":  # its machines have the pools
        check_memory(config)
    if config.index.redis_url:
        await check_redis(config.index.redis_url)


def check_model(directory: Path) -> None:
    """Raise ``ModelMissing`` if ``directory`` is not a checkpoint."""
    read_model_config(directory)
    if not (directory / "tokenizer.json").is_file():
        raise ModelMissing(directory, "has no tokenizer.json")
    if not any(directory.glob("*.safetensors")):
        raise ModelMissing(directory, "has no *.safetensors")


def check_port(host: str, port: int) -> None:
    """Raise ``PortInUse``, or ``ConfigError``: no process listens at ``host``. Port 0 is never in use."""
    try:
        check_free(host, port)
    except OSError as error:
        raise no_listener(error, host, port, "conductor.host", "one with --port") from error


def check_memory(*configs: Config) -> None:
    """Raise ``TooLittleMemory`` if the pools of all nodes of these models exceed the free memory."""
    needed, available = sum(map(_needed_nbytes, configs)), available_nbytes()
    if needed > available:
        raise TooLittleMemory(needed, available)


def _needed_nbytes(config: Config) -> int:
    lent = config.store.host.capacity_nbytes + config.store_node.object_nbytes
    pools = 0 if computes_on_gpus(config) else pools_nbytes(config)
    return pools + config.cluster.store * lent


def available_nbytes() -> int:
    """Return the memory that pools may take: of the machine, the container, and the process (ulimit -v)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    available = HostWatch().read().memory_available_nbytes
    return available if limit == resource.RLIM_INFINITY else min(available, limit)


async def check_redis(url: str) -> None:
    """Raise ``IndexUnreachable`` if the Redis at ``url`` does not answer."""
    try:
        client = connect(url)
        try:
            async with asyncio.timeout(_REDIS_S):
                await client.ping()
        finally:
            await client.aclose()
    except (StoreError, RedisError, RedisClusterException, OSError, ValueError) as error:
        raise IndexUnreachable(url, str(error) or f"no answer in {_REDIS_S:g} s") from error
