"""A daemon of several replicas: one command and one name, with a supervised process for each replica."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moonpool.runtime.config.loading import to_toml
from moonpool.runtime.config.options import Config, NodeOptions
from moonpool.runtime.errors import ChildFailed, ConfigError
from moonpool.runtime.machine.gpus import replica_devices
from moonpool.runtime.replicas.identity import Replica
from moonpool.runtime.replicas.metrics_page import ReplicaMetrics
from moonpool.runtime.replicas.supervisor import ReplicaProcess
from moonpool.runtime.service.child import Child
from moonpool.runtime.service.heartbeat import BEATS_PER_TIMEOUT
from moonpool.runtime.service.lifecycle import ServiceContext
from moonpool.runtime.service.load_progress import LoadProgress, TotalProgress

log = logging.getLogger(__name__)

# Grace beyond the drain time of the options; a replica stopped by SIGSTOP would never end.
_GRACE_S = 10.0
# Time that a second SIGTERM leaves replicas to remove themselves from the index.
_STOP_S = 3.0


class ReplicaGroup:
    """Several processes of one daemon, each with its own options and ports.

    The group is ready when all are, drains them together, and ends them with this process. In between, each
    is restarted on its own. Replicas of a node have their own ids in the index; their records there name the
    group.
    """

    def __init__(
        self,
        config: Config,
        role: str,
        command: Sequence[str],
        configs: Sequence[Config],
        *,
        drain_s: float,
        common: Sequence[str] = (),
    ) -> None:
        """``command`` starts the daemon, without options. ``configs``: of each replica, see
        ``replica_configs`` and ``worker_configs``. ``drain_s``: the longest that one takes to drain, by its
        options. ``common``: names of facts of a ready line that are the same for all; ours has them too."""
        self.node_id = config.node.id or f"{role}-{config.node.host}-{os.getpid()}"
        self._config = config
        self._command = list(command)
        self._configs = list(configs)
        self._drain_s = drain_s
        self._common = common
        self._drain = asyncio.Event()
        self._loaded = TotalProgress(None, len(self._configs))
        self._replicas: list[ReplicaProcess] = []

    async def run(self, context: ServiceContext) -> None:
        """Run until drained. Raises as ``ReplicaProcess.supervise`` once the others have drained."""
        began_s = time.monotonic()
        metrics = ReplicaMetrics(
            self._config.node.host,
            self._config.node.metrics_port,
            keyed=bool(self._config.conductor.tenants_path),
        )
        loading = LoadProgress(self.node_id, context.loaded)
        self._loaded = TotalProgress(loading, len(self._configs))
        replicas = self._replicas = metrics.replicas = [
            ReplicaProcess(
                Replica(self.node_id, number, len(self._configs), os.getpid(), metrics.url),
                self._create,
                self._config.engine.parallel,
            )
            for number in range(len(self._configs))
        ]
        supervisors = [asyncio.create_task(one.supervise(), name=f"replica {one.number}") for one in replicas]
        drains = [asyncio.create_task(event.wait()) for event in (context.draining, self._drain)]
        ready = asyncio.gather(*(one.was_ready.wait() for one in replicas))
        ends: list[asyncio.Future[Any]] = [*drains, *supervisors]
        try:
            await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
            loading.close()
            if ready.done():
                join_s = time.monotonic() - began_s
                log.info("%d replicas are ready after %.2f s", len(replicas), join_s)
                first = replicas[0].facts
                context.ready(
                    **{name: first[name] for name in self._common if name in first},
                    node_id=self.node_id,
                    metrics_url=metrics.url,
                    join_s=round(join_s, 3),
                    replicas=[one.facts for one in replicas],
                )
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self._end(supervisors)
        finally:
            loading.close()
            ready.cancel()
            for task in ends:
                task.cancel()
            await asyncio.gather(*supervisors, return_exceptions=True)
            await asyncio.gather(*(one.stop(_STOP_S) for one in replicas))

    async def _end(self, supervisors: list[asyncio.Task[None]]) -> None:
        """Drain all replicas. Raises the first replica's error, or ChildFailed if one does not end."""
        for supervisor in supervisors:
            if supervisor.done():
                log.error("%s: the other replicas drain and the node ends", supervisor.exception())
        for one in self._replicas:
            one.drain()
        limit_s = self._drain_s + _GRACE_S
        await asyncio.wait(supervisors, timeout=limit_s)
        for one, supervisor in zip(self._replicas, supervisors, strict=True):
            if not supervisor.done():
                raise ChildFailed(
                    f"replica {self.node_id}.{one.number}",
                    f"did not end within {limit_s:g} s of the request to drain and is killed",
                )
            supervisor.result()

    def _create(self, replica: Replica) -> Child:
        # Options go through stdin because they may contain secrets, and a file could change between starts.
        config = self._configs[replica.number]
        command = [*self._command, "--config", "-"]
        if config.node.id:
            command += ["--set", f"node.id={config.node.id}"]  # repeated for `ps`
        loaded = self._loaded.of(replica.number)
        return Child(
            f"replica {replica.replica_id}",
            command,
            None,
            environment=replica.environment(),
            sends_json=True,
            stdin=to_toml(config).encode(),
            on_message=self._on_message,
            on_loaded=lambda done, total: loaded(done, total, ""),
            beat_s=config.engine.parallel.timeout_s / BEATS_PER_TIMEOUT,
        )

    def _on_message(self, message: dict[str, Any]) -> None:
        """Drain all replicas when one of them was told to drain."""
        if message.get("draining"):
            self._drain.set()


def replica_configs(config: Config) -> list[Config]:
    """The configuration of each replica. Raises ConfigError if there are too few GPUs or ports."""
    _check_ports(config.node, config.engine.parallel.dp)
    return [
        replace(
            config,
            model=replace(config.model, device=device),
            engine=replace(
                config.engine,
                parallel=replace(
                    config.engine.parallel, dp=1, listen=_next_port(config.engine.parallel.listen, number)
                ),
            ),
            node=_numbered(config.node, number),
            # As in vLLM, each replica publishes events on its own port, counted from the configured one.
            events=replace(
                config.events,
                zmq_endpoint=_endpoint(config.events.zmq_endpoint, number),
                replay_endpoint=_endpoint(config.events.replay_endpoint, number),
            ),
        )
        for number, device in enumerate(replica_devices(config))
    ]


def worker_configs(config: Config, port: int) -> list[Config]:
    """The configuration of each of ``conductor.workers``, with ``port`` for the API. Raises ConfigError if
    there are too few ports for their calls among each other."""
    count = config.conductor.workers
    _check_ports(config.node, count)
    own = replace(config.conductor, port=port, workers=1)
    return [replace(config, conductor=own, node=_numbered(config.node, n)) for n in range(count)]


def _check_ports(node: NodeOptions, count: int) -> None:
    if node.port and node.port + count > 65536:
        raise ConfigError(
            f"node.port is {node.port}, but {count} replicas need {count} ports from there up to 65535; "
            "set a lower node.port",
            "node.port",
        )


def _numbered(node: NodeOptions, number: int) -> NodeOptions:
    return replace(
        node,
        id=f"{node.id}.{number}" if node.id else "",
        port=node.port + number if node.port else 0,
        metrics_port=0,
    )


def _endpoint(endpoint: str, number: int) -> str:
    if endpoint.startswith("tcp://"):
        return _next_port(endpoint, number)
    return f"{endpoint}_dp{number}" if endpoint else ""


def _next_port(address: str, number: int) -> str:
    """``address`` with ``number`` added to its port; unchanged without a port or with port 0."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}" if port.isdigit() and int(port) else address
