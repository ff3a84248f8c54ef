"""A whole cluster on this machine: Redis, a conductor and nodes as child processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from moonpool.client import Client
from moonpool.errors import ApiError
from moonpool.local.node_configs import gpu_options, node_configs
from moonpool.local.preflight import check_before_start
from moonpool.local.preload import PRELOAD
from moonpool.local.redis_server import RedisServer
from moonpool.runtime.config.loading import to_toml
from moonpool.runtime.config.options import Config, SecurityOptions
from moonpool.runtime.errors import ChildFailed
from moonpool.runtime.machine.gpus import computes_on_gpus
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.security.process import local_key
from moonpool.runtime.service.child import Child
from moonpool.runtime.service.fork_server import use_fork_server

READY_TIMEOUT_S = 120.0  # a large checkpoint takes a while to load
JOIN_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
RESTARTS = 3  # of one child


def _short_directory() -> Path:
    """Create a private directory; short, because a Unix socket's path is limited to 107 bytes."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="moonpool-", dir=base if len(os.fsencode(base)) < 70 else "/tmp"))


class LocalCluster:
    """``async with LocalCluster(config) as cluster``: serving at ``cluster.url`` inside the block.

    Args:
        directory: for logs (``NAME.log``); by default a temporary one, removed unless something failed.
        restart: restart a node or Redis that dies.
        report: gets a sentence about each event.
        loaded: gets a child's name, bytes loaded and all bytes while weights are loaded.

    ``children`` by name: redis (unless ``index.redis_url`` is set), conductor, prefill-0, decode-0, …
    The kernel kills every child when this process ends, however it ends.
    """

    def __init__(
        self,
        config: Config,
        *,
        directory: Path | None = None,
        restart: bool = False,
        report: Callable[[str], None] = lambda sentence: None,
        loaded: Callable[[str, int, int], None] = lambda name, nbytes_done, nbytes_total: None,
    ) -> None:
        num_nodes = max(1, config.cluster.prefill + config.cluster.decode)
        threads = config.engine.compute_threads(usable_cores(), num_nodes)
        self.config = replace(
            config,
            # No load balancer is in front of it.
            conductor=replace(config.conductor, leave_s=0.0),
            engine=replace(config.engine, threads=threads),
        )
        self.directory = directory or Path()  # chosen in start
        self.redis: RedisServer | None = None
        self.children: dict[str, Child] = {}
        self._made_directory = self._remove_directory = directory is None
        self._restart = restart
        self._report = report
        self._loaded = loaded
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def url(self) -> str:
        """The API's URL."""
        return str(self.children["conductor"].ready["url"])

    @property
    def nodes(self) -> list[Child]:
        return [child for name, child in self.children.items() if name not in ("redis", "conductor")]

    async def start(self) -> None:
        """Start everything; returns when the conductor serves and sees every node.

        Raises:
            MoonpoolError: says what to do. All children have been stopped.
        """
        if (server := use_fork_server(PRELOAD)) is not None:
            server.start()  # it imports in the background
        await check_before_start(self.config)
        if self._remove_directory:
            self.directory = _short_directory()
        try:
            await self._start_redis()
            self._create_children()
            async with asyncio.TaskGroup() as group:
                for child in (self.children["conductor"], *self.nodes):
                    group.create_task(self._start_child(child))
            await self._wait_joined()
        except BaseException as error:
            self._remove_directory &= not isinstance(error, Exception)
            await self.stop()
            # Report the child that failed, not those that were stopped for it.
            raise error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error from None
        for name in self.children:
            self._start_watching(name)

    async def wait_broken(self) -> None:
        """Wait until the cluster cannot go on; raises the error: ``ChildFailed`` if the conductor ended."""
        await asyncio.shield(self._broken)

    async def stop(self) -> None:
        """Stop all; the conductor first, so that it does not see its nodes leave. Idempotent."""
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        for group in ([self.children["conductor"]] if "conductor" in self.children else [], self.nodes):
            await asyncio.gather(*(child.stop(STOP_TIMEOUT_S) for child in group))
        if self.redis is not None:
            await self.redis.stop()
        if self._remove_directory:
            shutil.rmtree(self.directory, ignore_errors=True)
        elif self._made_directory:
            self._report(f"something failed: the logs are kept in {self.directory}")

    async def restart(self, name: str) -> None:
        """Restart a child that has ended; returns when it is ready."""
        if name == "redis" and self.redis is not None:
            await self.redis.start()
        else:
            await self._start_child(self.children[name])
        if watcher := self._watchers.get(name):
            watcher.cancel()
        self._start_watching(name)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_directory &= not isinstance(error, Exception)
        await self.stop()

    async def _start_redis(self) -> None:
        if self.config.index.redis_url:
            return
        self.redis = RedisServer(self.directory)
        self.children["redis"] = self.redis.child
        await self.redis.start()
        self._report(f"redis from {self.redis.binary.origin}: {self.redis.url}")
        self.config = replace(self.config, index=replace(self.config.index, redis_url=self.redis.url))

    def _create_children(self) -> None:
        if self.config.security == SecurityOptions():
            key = local_key()
            self.config = replace(self.config, security=SecurityOptions(cluster_key=key))
        # A file rather than arguments: a secret among the options must not show in the process list.
        file = self.directory / "cluster.toml"
        file.touch(mode=0o600)
        file.write_text(to_toml(self.config), encoding="utf-8")
        environment = {
            # Idle OpenMP threads must not spin: other processes need the cores.
            "OMP_NUM_THREADS": str(self.config.engine.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }

        def create(name: str, module: str, *options: str) -> None:
            command = [sys.executable, "-m", module, "--config", str(file)]
            for option in options:
                command += ["--set", option]
            log = self.directory / f"{name}.log"
            loaded = partial(self._loaded, name)
            self.children[name] = Child(
                name, command, log, environment=environment, sends_json=True, on_loaded=loaded
            )

        create("conductor", "moonpool.conductor", "node.port=0")
        counts = self.config.cluster
        roles: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
            ("prefill", "moonpool.prefill_node", counts.prefill, counts.prefill_options),
            ("decode", "moonpool.decode_node", counts.decode, counts.decode_options),
            ("store", "moonpool.kvstore.store_node", counts.store, ()),
        )
        where = iter(gpu_options(node_configs(self.config), computes_on_gpus(self.config)))
        for role, module, count, options in roles:
            for number in range(count):
                name = f"{role}-{number}"
                gpu = () if role == "store" else next(where)
                create(name, module, *gpu, *options, f"node.id={name}", "node.port=0", "node.metrics_port=0")

    async def _start_child(self, child: Child) -> None:
        began_s = asyncio.get_running_loop().time()
        await child.start()
        await child.wait_ready(READY_TIMEOUT_S)
        self._report(f"{child.name} is ready after {asyncio.get_running_loop().time() - began_s:.1f} s")

    async def _wait_joined(self) -> None:
        """Wait until the conductor sees every node ready."""
        missing = expected = {child.name for child in self.nodes}
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S), Client(self.url) as client:
                while missing := expected - await self._seen(client):
                    for child in self.children.values():
                        if child.returncode is not None:
                            raise child.failure(f"ended with code {child.returncode}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise self.children["conductor"].failure(
                f"did not see {', '.join(sorted(missing))} within {JOIN_TIMEOUT_S:.0f} s"
            ) from None

    async def _seen(self, client: Client) -> set[str]:
        try:
            cluster = await client.cluster()
        except ApiError:
            return set()  # it may not answer before it has read the index
        return {node["node_id"] for node in cluster["nodes"] if node["state"] in ("ready", "unhealthy")}

    def _start_watching(self, name: str) -> None:
        watcher = self._watchers[name] = asyncio.create_task(self._watch(name), name=f"watch {name}")
        watcher.add_done_callback(self._watcher_ended)

    def _watcher_ended(self, watcher: asyncio.Task[None]) -> None:
        """Without its watcher a child would die unseen."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # retrieved: wait_broken need not be called

    async def _watch(self, name: str) -> None:
        """Report a child's end; restart it if configured, at most ``RESTARTS`` times."""
        child = self.children[name]
        for restarts_left in range(RESTARTS if self._restart and name != "conductor" else 0, -1, -1):
            code = await child.wait()
            self._remove_directory = False
            failure = child.failure(f"ended with code {code}")
            if not restarts_left:
                break
            self._report(f"{name} ended with code {code}: starting it again ({child.log})")
            try:
                await (self.redis.start() if name == "redis" and self.redis else self._start_child(child))
            except ChildFailed as error:
                failure = error
                break
        self._report(str(failure))
        # The cluster serves without a node, and without Redis, but not without the conductor.
        if name == "conductor":
            self._break(failure)
