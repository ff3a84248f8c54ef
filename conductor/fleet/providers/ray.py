"""Nodes on the machines of a Ray cluster: actors, started again by Ray, found by us in the index."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from moonpool.conductor.fleet.errors import PlannerOutdated, ProviderFailed
from moonpool.conductor.fleet.providers.provider import FAILED, STOPPING, SuppliedNode
from moonpool.kvstore.index.redis.node_record import ROLES
from moonpool.runtime.config.loading import to_toml
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError

if TYPE_CHECKING:
    from moonpool.conductor.fleet.providers.ray_cluster import RayCluster

T = TypeVar("T")

_TIMEOUT_S = 30.0
_LOOK_S = 1.0
_FAILED_KEPT = 16
_ENDED = "ended"  # ray_node.ENDED
ANSWER_S = 4.0
_AUTO = "auto"
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class RayProvider:
    """Starts nodes with the options of ``config``: a core for each thread, a GPU for each rank, on as many
    machines as ``engine.parallel.hosts``.

    Nodes of equal ``index.*`` options are one fleet, whichever process asks. They outlive it.
    """

    name = "ray"

    def __init__(self, config: Config) -> None:
        """Raises ``ConfigError``: Ray is not installed, or replicas need several machines each."""
        if find_spec("ray") is None:
            raise ConfigError("fleet.provider=ray needs Ray: pip install 'moonpool[ray]'", "fleet.provider")
        if config.engine.parallel.hosts > 1 and config.engine.parallel.dp > 1:
            raise ConfigError(
                "fleet.provider=ray runs no replicas on several machines: start as many nodes instead "
                "(engine.parallel.dp=1)",
                "engine.parallel.dp",
            )
        self._config = config
        same = f"{config.index.redis_url} {config.index.namespace}".encode()
        self._fleet = hashlib.sha256(same).hexdigest()[:12]
        self._connected: RayCluster | None = None
        self._closed = False
        self._started_s: dict[str, float] = {}
        self._roles: dict[str, str] = {}
        self._failed: dict[str, SuppliedNode] = {}
        self._turn = asyncio.Lock()  # its calls share a connection
        self._reapers: set[asyncio.Task[None]] = set()

    async def start(self, role: str, model: str, fence: int = 0) -> str:
        if role not in ROLES:
            raise ProviderFailed(f"Ray starts nodes of {', '.join(ROLES)}, not {role[:32]!r}")
        node_id = f"{role}-{secrets.token_hex(4)}"

        def asked(cluster: RayCluster) -> None:
            module = import_module("moonpool.conductor.fleet.providers.ray_cluster")
            cluster.check(fence)
            _check_redis(self._config.index.redis_url, cluster.machines(), module.is_here)
            engine = self._config.engine
            parallel, threads = engine.parallel, engine.threads or 1
            ranks = parallel.dp * parallel.ranks_per_host
            on_gpus = self._config.model.device != "cpu" and cluster.has_gpus()
            gpus = ranks if on_gpus else 0
            resources = module.Resources(ranks * threads, gpus, parallel.hosts, parallel.ranks_per_host)
            own = {
                "prefill": self._config.cluster.prefill_options,
                "decode": self._config.cluster.decode_options,
            }
            options = [f"engine.threads={threads}", *own.get(role, ())]
            drain_s = self._config.node.drain_s + self._config.store.flush_s
            cluster.start(node_id, resources, role, to_toml(self._config), options, drain_s)

        await self._call(f"a {role} node was not started", asked)
        self._started_s[node_id], self._roles[node_id] = time.monotonic(), role
        return node_id

    async def stop(self, node_id: str, fence: int = 0) -> None:
        def asked(cluster: RayCluster) -> None:
            cluster.check(fence)
            cluster.stop(node_id)

        await self._call(f"{node_id} was not stopped", asked)
        reaper = asyncio.create_task(self._reap(node_id), name=f"end of {node_id}")
        self._reapers.add(reaper)
        reaper.add_done_callback(self._reapers.discard)

    async def list(self) -> Sequence[SuppliedNode]:
        listed = await self._call("the nodes on Ray are unknown", lambda cluster: cluster.listed())
        nodes, over, now_s = list[SuppliedNode](), list[str](), time.monotonic()
        for node_id, (told, state, reason) in listed.items():
            role = self._roles[node_id] = told or self._roles.get(node_id) or node_id.rpartition("-")[0]
            age_s = now_s - self._started_s.setdefault(node_id, now_s)
            node = SuppliedNode(node_id, role, STOPPING if state == _ENDED else state, reason, age_s)
            if state == FAILED:
                self._failed[node_id] = node
            if state in (FAILED, _ENDED):
                over.append(node_id)
            else:
                nodes.append(node)
        if over:
            await self._call("nodes were not ended", lambda cluster: cluster.end(*over))
        while len(self._failed) > _FAILED_KEPT:
            del self._failed[next(iter(self._failed))]
        return [*nodes, *self._failed.values()]

    async def stop_all(self) -> None:
        """End all nodes at once, those of other processes included. Raises ``ProviderFailed``."""
        if self._connected is None:
            return  # it has started none
        await self._call("nodes on Ray were not ended", lambda cluster: cluster.end_all())

    async def close(self) -> None:
        self._closed = True
        for reaper in self._reapers:
            reaper.cancel()
        cluster, self._connected = self._connected, None
        if cluster is not None:
            await _in_thread(cluster.close)

    async def _reap(self, node_id: str) -> None:
        """A node that has drained keeps its place until it is listed."""
        try:
            while any(node.node_id == node_id for node in await self.list() if node.state != FAILED):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
        except ProviderFailed:
            return  # the next listing does it

    async def _call(self, what: str, call: Callable[[RayCluster], T]) -> T:
        def calls() -> T:
            module = import_module("moonpool.conductor.fleet.providers.ray_cluster")
            try:
                if self._connected is None:
                    connected = module.RayCluster(self._config.fleet.ray, self._fleet)
                    if self._closed:  # its caller has given up
                        connected.close()
                        raise ProviderFailed("it was given up")
                    self._connected = connected
                return call(self._connected)
            except (module.RayError, OSError, RuntimeError, ValueError) as error:
                raise ProviderFailed(f"Ray: {error}") from error

        async with self._turn:
            try:
                if self._connected is None:
                    await check_answers(self._config.fleet.ray)
                async with asyncio.timeout(_TIMEOUT_S):
                    return await _in_thread(calls)
            except PlannerOutdated as error:
                raise PlannerOutdated(f"{what}: {error}", error.latest) from error
            except ProviderFailed as error:
                raise ProviderFailed(f"{what}: {error}") from error
            except TimeoutError:
                raise ProviderFailed(f"{what}: Ray did not answer within {_TIMEOUT_S:g} s") from None


async def _in_thread(call: Callable[[], T]) -> T:
    """As ``asyncio.to_thread``, but the end of the process waits for no thread: Ray may try for minutes."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="call to Ray", daemon=True).start()
    return await asyncio.wrap_future(done)


async def check_answers(address: str, answer_s: float = ANSWER_S) -> None:
    """``address``: as in ``fleet.ray``. One that Ray finds by itself, or reaches by TLS, is not tried. Where
    nothing answers, Ray itself would try for half a minute.

    Raises ``ProviderFailed``: no gRPC server answered there within ``answer_s``.
    """
    if address == _AUTO:
        address = os.environ.get("RAY_ADDRESS") or _AUTO
    if address == _AUTO or os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true"):
        return
    options = (("grpc.enable_http_proxy", 0),)  # as Ray's own
    async with grpc.aio.insecure_channel(address.removeprefix("ray://"), options) as channel:
        try:
            # Any server of gRPC knows the method, or says that it does not.
            await channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)(b"", timeout=answer_s)
        except grpc.aio.AioRpcError as error:
            if error.code() in _SILENT:
                why = error.details() if error.code() is grpc.StatusCode.UNAVAILABLE else ""
                raise ProviderFailed(
                    f"no Ray cluster answers at {address}: {why or f'no answer within {answer_s:g} s'}. Give "
                    "the address of its client server, as ray://HOST:10001, or ray://auto on one of its "
                    "machines"
                ) from error


def _check_redis(url: str, machines: Sequence[str], is_here: Callable[[str], bool]) -> None:
    is_local = url.startswith("unix:") or any(name in url for name in ("localhost", "127.0.0.1", "[::1]"))
    away = [one for one in machines if not is_here(one)]
    if is_local and away:
        raise ProviderFailed(
            f"{', '.join(away[:3])} of the Ray cluster cannot reach Redis on this machine: give one that all "
            "reach (--redis, index.redis_url)"
        )
