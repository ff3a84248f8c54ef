"""A node of several replicas: one command and one name, a process each, started again when one is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moonpool.runtime.config.loading import to_toml
from moonpool.runtime.config.options import Config, EventsOptions
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

# Beyond what draining may take by the options; a replica that is stopped (SIGSTOP) would never end.
_LATE_S = 10.0
# A second SIGTERM gives replicas this long to leave the index.
_STOP_S = 3.0


class Replicas:
    """``engine.parallel.dp`` processes of the same daemon, each with its own share of what the node has.

    They are ready together, drain together, and end with this process, however it ends; between that each
    lives and dies on its own. They take requests and hold blocks under names of their own; one node they
    are because each says in the index whose replica it is.
    """

    def __init__(self, config: Config, role: str, command: Sequence[str]) -> None:
        """``command`` starts the daemon, without options. Raises ConfigError: too few GPUs or ports."""
        self.node_id = config.node.id or f"{role}-{config.node.host}-{os.getpid()}"
        self._config = config
        self._command = list(command)
        self._configs = replica_configs(config)
        self._drain = asyncio.Event()
        self._loaded = TotalProgress(None, len(self._configs))
        self._replicas: list[ReplicaProcess] = []

    async def run(self, context: ServiceContext) -> None:
        """Until drained. Raises what ``ReplicaProcess.keep`` does; the others have drained then."""
        began_s = time.monotonic()
        metrics = ReplicaMetrics(self._config.node.host, self._config.node.metrics_port)
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
        keepers = [asyncio.create_task(one.keep(), name=f"replica {one.number}") for one in replicas]
        asked = [asyncio.create_task(event.wait()) for event in (context.draining, self._drain)]
        ready = asyncio.gather(*(one.was_ready.wait() for one in replicas))
        ends: list[asyncio.Future[Any]] = [*asked, *keepers]
        try:
            await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
            loading.close()
            if ready.done():
                join_s = time.monotonic() - began_s
                log.info("%d replicas are ready after %.2f s", len(replicas), join_s)
                context.ready(
                    node_id=self.node_id,
                    metrics_url=metrics.url,
                    join_s=round(join_s, 3),
                    replicas=[one.facts for one in replicas],
                )
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self._end(keepers)
        finally:
            loading.close()
            ready.cancel()
            for task in ends:
                task.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await asyncio.gather(*(one.stop(_STOP_S) for one in replicas))

    async def _end(self, keepers: list[asyncio.Task[None]]) -> None:
        """Let all drain. Raises what the first one ended with, or ChildFailed: it did not end."""
        for keeper in keepers:
            if keeper.done():
                log.error("%s: the others drain, and the node ends", keeper.exception())
        for one in self._replicas:
            one.drain()
        options = self._config
        limit_s = options.node.drain_s + options.store.flush_s + _LATE_S
        await asyncio.wait(keepers, timeout=limit_s)
        for one, keeper in zip(self._replicas, keepers, strict=True):
            if not keeper.done():
                raise ChildFailed(
                    f"replica {self.node_id}.{one.number}",
                    f"has not ended {limit_s:g} s after it was told to drain, and is killed",
                )
            keeper.result()

    def _create(self, replica: Replica) -> Child:
        # On stdin, rather than as arguments or in a file: there may be secrets among the options, and
        # every life is to have the same ones.
        config = self._configs[replica.number]
        command = [*self._command, "--config", "-"]
        if config.node.id:
            command += ["--set", f"node.id={config.node.id}"]  # it is there too: this one is for `ps`
        loaded = self._loaded.of(replica.number)
        return Child(
            f"replica {replica.replica_id}",
            command,
            None,
            environment=replica.environment(),
            speaks=True,
            given=to_toml(config).encode(),
            on_message=self._hear,
            on_loaded=lambda done, total: loaded(done, total, ""),
            beat_s=config.engine.parallel.timeout_s / BEATS_PER_TIMEOUT,
        )

    def _hear(self, message: dict[str, Any]) -> None:
        """What one replica is told to do by another than us, all do."""
        if message.get("draining"):
            self._drain.set()


def replica_configs(config: Config) -> list[Config]:
    """What each replica of a node is told. Raises ConfigError: there are too few GPUs or ports for them."""
    node, dp = config.node, config.engine.parallel.dp
    if node.port and node.port + dp > 65536:
        raise ConfigError(
            f"node.port is {node.port}: {dp} replicas need as many ports from it on", "node.port"
        )
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
            node=replace(
                node,
                id=f"{node.id}.{number}" if node.id else "",
                port=node.port + number if node.port else 0,
                metrics_port=0,
            ),
            events=_events(config.events, number),
        )
        for number, device in enumerate(replica_devices(config))
    ]


def _events(events: EventsOptions, number: int) -> EventsOptions:
    """Where a replica publishes: as vLLM has it, on the port of the replica before it plus one."""
    return replace(
        events,
        zmq_endpoint=_endpoint(events.zmq_endpoint, number),
        replay_endpoint=_endpoint(events.replay_endpoint, number),
    )


def _endpoint(endpoint: str, number: int) -> str:
    if endpoint.startswith("tcp://"):
        return _next_port(endpoint, number)
    return f"{endpoint}_dp{number}" if endpoint else ""


def _next_port(address: str, number: int) -> str:
    """Replica ``number``'s, where replica 0 has ``address``; the same where that has no port, or any."""
    where, _, port = address.rpartition(":")
    return f"{where}:{int(port) + number}" if port.isdigit() and int(port) else address
