"""A whole cluster on this machine: Redis, a conductor and nodes as child processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from moonpool.client import Client
from moonpool.errors import ApiError
from moonpool.local.children import NODE_MODULE, Children, ready_timeout_s
from moonpool.local.elastic_nodes import STOP_TIMEOUT_S, ElasticNodes
from moonpool.local.node_configs import TakenGpus, models_to_start
from moonpool.local.played_hosts import PlayedHost
from moonpool.local.preflight import check_before_start, check_memory
from moonpool.local.preload import COMPUTE_PRELOAD, PRELOAD
from moonpool.local.ray_nodes import RayNodes
from moonpool.local.redis_server import RedisServer
from moonpool.local.supervisor import Supervisor
from moonpool.local.vllm_engine import find_vllm, fit_for_vllm
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ChildFailed
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.observing.audit import audited
from moonpool.runtime.security.local_key import local_key
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import OPERATOR, Caller
from moonpool.runtime.service.child import Child
from moonpool.runtime.service.crash_loop import MAX_SHORT_RUNS, MIN_UPTIME_S, CrashLoop
from moonpool.runtime.service.fork_server import use_fork_servers
from moonpool.runtime.service.vital import cancel_and_wait

JOIN_TIMEOUT_S = 30.0


def _short_directory() -> Path:
    """Create a private directory; short, because a Unix socket's path is limited to 107 bytes."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="moonpool-", dir=base if len(os.fsencode(base)) < 70 else "/tmp"))


def _me() -> Caller:
    return Caller(OPERATOR, f"user-{os.getuid()}")


class LocalCluster:
    """``async with LocalCluster(config) as cluster``: serving at ``cluster.url`` inside the block.

    Args:
        directory: for logs (``NAME.log``); by default a temporary one, removed unless something failed.
        restart: restart a node or Redis that dies.
        supervises: let the conductor start and stop nodes (see ``local.supervisor``).
        hosts: 2: half of each node's stages on a second machine, played on this one (see ``played_hosts``).
        report: gets a sentence about each event.
        loaded: gets a child's name, bytes loaded and all bytes while weights are loaded.
        node_module: that the processes of nodes run, with the arguments of the usual one.

    ``children`` by name: redis (unless ``index.redis_url`` is set), conductor, prefill-0, decode-0, both-0, …
    The kernel kills every child when this process ends, however it ends.
    """

    def __init__(
        self,
        config: Config,
        *,
        directory: Path | None = None,
        restart: bool = False,
        supervises: bool = False,
        hosts: int = 1,
        report: Callable[[str], None] = lambda sentence: None,
        loaded: Callable[[str, int, int], None] = lambda name, nbytes_done, nbytes_total: None,
        node_module: str = NODE_MODULE,
    ) -> None:
        if config.cluster.engine == "vllm":
            config = fit_for_vllm(config)
        models = models_to_start(config)
        if not (config.models.served or config.models.path):
            config = models[0].config
        self._on_ray = config.fleet.provider == "ray"
        threads = config.engine.threads
        if not self._on_ray:
            num_compute = sum(one.config.cluster.num_compute for one in models)
            threads = config.engine.compute_threads(usable_cores(), num_compute)
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
        self._supervises = supervises
        self._hosts = hosts
        self._host: PlayedHost | None = None
        self._report = report
        self._loaded = loaded
        self._node_module = node_module
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._elastic = ElasticNodes(
            self.children,
            report=report,
            watch=self._start_watching,
            unwatch=self._stop_watching,
            on_ended=self._watcher_ended,
        )
        self._supervisor = Supervisor(self._elastic)
        self._ray: RayNodes | None = None
        self.supervisor_address = ""  # where conductors start and stop nodes; empty: nowhere
        self._audited = ExitStack()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def url(self) -> str:
        """The API's URL."""
        return str(self.children["conductor"].ready["url"])

    def client(self) -> Client:
        """A client that may do everything, whatever API keys are configured."""
        security = self.config.security
        return Client(self.url, security=Security(security, _me(), serves=False), ca=security.ca)

    @property
    def nodes(self) -> list[Child]:
        return self._elastic.nodes

    async def start(self) -> None:
        """Start everything; returns when the conductor serves and sees every node.

        Raises:
            MoonpoolError: says what to do. All children have been stopped.
        """
        compute = COMPUTE_PRELOAD | {self._node_module: COMPUTE_PRELOAD[NODE_MODULE]}
        for server in use_fork_servers(compute, PRELOAD):
            server.start()  # it imports in the background
        models = [one.config for one in models_to_start(self.config)]
        for one in models:
            await check_before_start(one)
        if not self._on_ray:
            check_memory(*(one for one in models if one.planner.min_warm or not self._supervises))
        if self.config.cluster.engine == "vllm":
            find_vllm()
        if self._remove_directory:
            self.directory = _short_directory()
        try:
            await self._start_redis()
            if self._hosts > 1:
                self._host = PlayedHost(self.directory)
                self._report(await self._host.open())
                self.config = self._host.cluster_config(self.config)
            await self._create_children()
            # The conductor may have others started meanwhile, and nodes stopped.
            first = list(self.children)
            if self._ray is not None:
                await self._ray.connect()
            async with asyncio.TaskGroup() as group:
                for child in (self.children["conductor"], *self.nodes):
                    group.create_task(self._start_first(child))
            await self._wait_joined(first, await self._ray.start() if self._ray is not None else ())
        except BaseException as error:
            self._remove_directory &= not isinstance(error, Exception)
            await self.stop()
            # Report the child that failed, not those that were stopped for it.
            raise error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error from None
        for name in first:
            if self._elastic.stays(name):
                self._start_watching(name)

    async def wait_broken(self) -> None:
        """Wait until the cluster cannot go on; raises the error: ``ChildFailed`` if the conductor ended."""
        await asyncio.shield(self._broken)

    async def stop(self) -> None:
        """Stop all; the conductor first, so that it does not see its nodes leave. Idempotent."""
        await self._supervisor.close()
        await self._elastic.close()
        self._audited.close()
        await cancel_and_wait(*self._watchers.values())
        for group in ([self.children["conductor"]] if "conductor" in self.children else [], self.nodes):
            await asyncio.gather(*(child.stop(STOP_TIMEOUT_S) for child in group))
        if self._ray is not None:
            await self._ray.stop()
        if self._host is not None:
            await self._host.close()
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

    async def _create_children(self) -> None:
        security = self.config.security
        if not security.cluster_key and not security.insecure:
            # Also beside certificates: commands sign their HTTP requests with it.
            self.config = replace(self.config, security=replace(security, cluster_key=local_key()))
        if not self.config.audit.path:
            audit = replace(self.config.audit, path=str(self.directory / "audit"))
            self.config = replace(self.config, audit=audit)
        options: tuple[str, ...] = ()
        if self._on_ray:
            self._ray = RayNodes(self.config, self._report)
        elif self._supervises:
            self._audited.enter_context(audited(self.config.audit, "supervisor"))
            self.supervisor_address = await self._supervisor.start(Security(self.config.security, _me()))
            options = ("fleet.provider=local", f"fleet.supervisor={self.supervisor_address}")
        taken = TakenGpus()
        made = Children(
            self.config,
            self.directory,
            self._loaded,
            host=self._host,
            node_module=self._node_module,
            taken=taken,
        )
        self.children["conductor"] = made.conductor(*options)
        nodes = {
            one.name: made
            if one.config is self.config
            else Children(one.config, self.directory, self._loaded, one.name, self._host, taken=taken)
            for one in models_to_start(self.config)
        }
        self._elastic.begin(self.config, nodes, supervises=bool(self.supervisor_address))

    async def _start_child(self, child: Child) -> None:
        began_s = asyncio.get_running_loop().time()
        await child.start()
        if child.name not in self.children:
            return  # it was stopped meanwhile
        await child.wait_ready(ready_timeout_s(child))
        self._report(f"{child.name} is ready after {asyncio.get_running_loop().time() - began_s:.1f} s")

    async def _start_first(self, child: Child) -> None:
        """Start a child that the cluster starts with. A node may be stopped meanwhile."""
        try:
            await self._start_child(child)
        except ChildFailed:
            if self._elastic.stays(child.name):
                raise
        finally:
            if child.name not in self.children:
                await child.stop(0.0)  # when it was stopped, it may have had no process

    async def _wait_joined(self, first: Sequence[str], away: Sequence[str]) -> None:
        """Wait until the conductor sees ready those of the ``first`` nodes that stay, and those on Ray
        (``away``)."""
        missing, trouble = {child.name for child in self.nodes}.union(away), ""
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S), self.client() as client:
                while True:
                    seen: set[str] = set()
                    try:
                        seen, trouble = await self._seen(client), ""
                    except ApiError as error:  # it may not answer before it has read the index
                        trouble = f": {error}"
                    staying = [self.children[name] for name in first if self._elastic.stays(name)]
                    for child in staying:
                        if child.returncode is not None:
                            raise child.failure(f"ended with code {child.returncode}")
                    missing = {child.name for child in staying if child in self.nodes}.union(away) - seen
                    if not missing:
                        return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise self.children["conductor"].failure(
                f"did not see {', '.join(sorted(missing))} within {JOIN_TIMEOUT_S:.0f} s{trouble}"
            ) from None

    async def _seen(self, client: Client) -> set[str]:
        cluster = await client.cluster()
        return {node["node_id"] for node in cluster["nodes"] if node["state"] in ("ready", "unhealthy")}

    def _start_watching(self, name: str) -> None:
        self._stop_watching(name)
        watcher = self._watchers[name] = asyncio.create_task(self._watch(name), name=f"watch {name}")
        watcher.add_done_callback(self._watcher_ended)

    def _stop_watching(self, name: str) -> None:
        if watcher := self._watchers.pop(name, None):
            watcher.cancel()

    def _watcher_ended(self, watcher: asyncio.Task[None]) -> None:
        """Without its watcher a child would die unseen."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # retrieved: wait_broken need not be called

    async def _watch(self, name: str) -> None:
        """Report a child's end; restart it if configured, until it fails ``MAX_SHORT_RUNS`` times in a row
        soon after its start."""
        child, crashes = self.children[name], CrashLoop()
        clock = asyncio.get_running_loop().time
        ready_s: float | None = clock()  # None: its last start failed
        while True:
            code = await child.wait()
            self._remove_directory = False
            failure = child.failure(f"ended with code {code}")
            if not self._restart or name == "conductor":
                break
            if crashes.gives_up(0.0 if ready_s is None else clock() - ready_s):
                failure = child.failure(
                    f"ended with code {code}, {MAX_SHORT_RUNS} times in a row within {MIN_UPTIME_S:g} s of "
                    "getting ready, and is not started again"
                )
                break
            self._report(f"{name} ended with code {code}: starting it again ({child.log})")
            try:
                await (self.redis.start() if name == "redis" and self.redis else self._start_child(child))
                ready_s = clock()
            except (ChildFailed, OSError) as error:
                ready_s = None
                if isinstance(error, OSError):  # it has no process, and so no log that says why
                    self._report(f"{name} was not started: {error}")
                child.kill()  # it may hang, instead of having ended
        if name in ("redis", "conductor"):
            self._report(str(failure))
        else:
            self._elastic.gave_up(name, failure)
        # The cluster serves without a node, and without Redis, but not without the conductor.
        if name == "conductor":
            self._break(failure)
