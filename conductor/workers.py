"""Several processes of one conductor behind one port (``conductor.workers``).

The kernel divides the connections among the workers (SO_REUSEPORT). To each other and to the nodes they are
several conductors: they share their load, book with each other, and find each other's stored responses and
resumable streams in Redis.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moonpool.runtime.config.options import Config
from moonpool.runtime.network.sockets import host_port, no_listener
from moonpool.runtime.observing.metrics_server import serve_metrics
from moonpool.runtime.replicas.group import ReplicaGroup, worker_configs
from moonpool.runtime.replicas.identity import Replica
from moonpool.runtime.service.fork_server import use_fork_servers
from moonpool.runtime.service.lifecycle import ServiceContext

_COMMAND = [sys.executable, "-m", "moonpool.conductor"]
# Workers share the memory of what is imported before they are forked.
_PRELOAD = {"moonpool.conductor": ("moonpool.conductor.core", "moonpool.conductor.server", "llguidance")}
_FRESH_S = 1.0


async def run_workers(config: Config, context: ServiceContext) -> None:
    """Run ``conductor.workers`` processes until drained. Raises ``PortInUse``, ``ConfigError``,
    ``ChildFailed``; none runs then."""
    use_fork_servers(_PRELOAD)
    drain_s = config.conductor.leave_s + config.node.drain_s
    with reserved_port(config.conductor.host, config.conductor.port) as port:
        configs = worker_configs(config, port)
        group = ReplicaGroup(config, "conductor", _COMMAND, configs, drain_s=drain_s, common=("url", "model"))
        await group.run(context)


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold ``port`` (0: a free one) of ``host`` for sockets with SO_REUSEPORT.

    Nothing listens here: connections go to those that do. Raises ``PortInUse``, or ``ConfigError``: nothing
    can listen at ``host``.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # Without SO_REUSEPORT, so that another conductor with workers does not get a part of our connections.
        with _bound(family, kind, protocol, address) as alone:
            port = alone.getsockname()[1]
        held = _bound(family, kind, protocol, (address[0], port, *address[2:]), shared=True)
    except OSError as error:
        raise no_listener(error, host, port, "conductor.host", "conductor.port") from error
    with held:
        yield port


def _bound(
    family: int, kind: int, protocol: int, address: tuple[object, ...], *, shared: bool = False
) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def group_of(worker: Replica) -> str:
    """The same for all workers of one parent, and for no others."""
    return f"{socket.gethostname()}/{worker.node_id}/{worker.node_pid}"


def serve_worker_metrics(config: Config, registry: CollectorRegistry, refresh: Callable[[], None]) -> str:
    """Serve a worker's own page, which its parent merges with the others'; return its URL.

    ``refresh``: brings gauges up to date; called on this event loop.
    """
    own = CollectorRegistry()
    own.register(_Fresh(registry, refresh))
    host = config.node.host
    port = serve_metrics(host, 0, own, keyed=bool(config.conductor.tenants_path)).port
    return f"http://{host_port(host, port)}/metrics"


class _Fresh(Collector):
    """The metrics of ``registry``, read in any thread after ``refresh`` has run on the event loop."""

    def __init__(self, registry: CollectorRegistry, refresh: Callable[[], None]) -> None:
        self._registry = registry
        self._refresh = refresh
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        async def refreshed() -> None:
            self._refresh()

        # A loop that is busy for longer than this has gauges that are a little old.
        asyncio.run_coroutine_threadsafe(refreshed(), self._loop).result(_FRESH_S)
        yield from self._registry.collect()
