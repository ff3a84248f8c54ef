"""The common part of all roles: an engine, memory that peers can read, an entry in the index."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from moonpool.engine.adapters.registry import AdapterRegistry
from moonpool.engine.adapters.residency import AdapterPin, AdapterRef
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.device.cuda import gpu_uuids, machine_of
from moonpool.engine.device.selection import weights_dtype
from moonpool.engine.errors import (
    AdapterNameTaken,
    AdapterRefused,
    NodeDraining,
    RankLost,
    RankSlow,
    RoleUnsupported,
)
from moonpool.engine.node.engine_memory import EngineMemory
from moonpool.engine.node.first_connections import connect_nodes
from moonpool.engine.node.join_phases import JoinPhases
from moonpool.engine.node.kept_experts import KeptExperts
from moonpool.engine.node.metrics import (
    NODE_JOIN_SECONDS,
    RANK_DETECT_SECONDS,
    RANKS_LOST,
    REGROUP_SECONDS,
    SLOW,
    observe_engine,
)
from moonpool.engine.node.slow_rank import SlowRankWatch
from moonpool.engine.node.slow_rank_decision import Remedy
from moonpool.engine.node.work_time import WorkTime
from moonpool.engine.prefix_cache.peer_exchange import PeerExchange
from moonpool.engine.prefix_cache.store import NodeStore
from moonpool.engine.prefix_cache.tenant_cache import TenantCache
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.events.publisher import EventPublisher
from moonpool.kvstore.eviction.tenant_metrics import TenantLabels, observe_tenants
from moonpool.kvstore.index.node_publisher import IndexPublisher
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord, stages_of
from moonpool.kvstore.store.collector import observe_stores
from moonpool.kvstore.tiers.metrics import evicted_totals
from moonpool.protos import node_pb2
from moonpool.runtime import rpc
from moonpool.runtime.config.agreement import agreement_of
from moonpool.runtime.config.options import Config
from moonpool.runtime.health.monitor import HealthMonitor, NodeUnfit
from moonpool.runtime.machine.description import own_version, versions_of
from moonpool.runtime.network.sockets import host_port
from moonpool.runtime.observing import failures
from moonpool.runtime.observing.metrics_server import serve_metrics
from moonpool.runtime.replicas.identity import Replica
from moonpool.runtime.service.crash_loop import CrashLoop
from moonpool.runtime.service.lifecycle import ServiceContext
from moonpool.runtime.service.load_progress import LoadProgress
from moonpool.runtime.service.vital import cancel_and_wait, vital
from moonpool.runtime.structure.grammars import Grammars
from moonpool.transfer import TransferAgent
from moonpool.transfer.metrics import path_totals

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.5
# How often ranks without shared memory are asked for their expert load, for the metrics.
EXPERT_LOAD_INTERVAL_S = 5.0
# The adapters in memory that a record names, those used last: 40 bytes each, in every heartbeat.
_MOST_RESIDENTS = 256

Key = tuple[str, int]  # request id, attempt


class EngineNode(ABC):
    """A node of any role. Subclasses add their own service and count their requests.

    ``await run(context)`` returns when the node has drained. Everything runs on one event loop. What a start
    opens is closed in reverse order, however far the start came.
    """

    role: str
    stages: tuple[str, ...]
    """The stages of requests that it can serve, whatever its role is now."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.clock: Callable[[], float] = time.time
        self.replica = Replica.ours()
        own_id = config.node.id or f"{self.role}-{config.node.host}-{os.getpid()}"
        self.node_id = self.replica.replica_id if self.replica is not None else own_id
        # On disk. It must be the same after a restart and a switch of the role; a generated node id contains
        # the process id.
        self._folder = config.node.id or (f"{self.role}.{self.replica.number}" if self.replica else self.role)
        self.kept_experts = KeptExperts(
            self.node_id, is_named=bool(config.node.id) or self.replica is not None
        )
        self.epoch = time.time_ns()
        self.state = "starting"
        self.rpc_address = ""
        self._server: rpc.Server | None = None
        self.metrics_url = ""
        self.draining = asyncio.Event()
        self.num_starts = self.replica.start_number if self.replica is not None else 1
        self._versions = versions_of(("moonpool", "torch"))
        self._began_s = self._ready_s = 0.0  # of this start
        self.work_time = WorkTime(time.monotonic())  # of this start, too
        self._ended_by: RankLost | RankSlow | None = None  # the life before
        self._ended_s = 0.0
        self._regrouped_s: float | None = None  # because of a slow rank
        self.tenant_labels = TenantLabels()
        self.events: EventPublisher | None = None  # where configured

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def servicers(self) -> list[rpc.Servicer]:
        """Return the gRPC services of this node: ``node_servicers(self)`` and the role's own."""

    @abstractmethod
    def num_requests(self) -> int:
        """Return the number of requests that a drain waits for."""

    def is_behind(self) -> bool:
        """Return whether streams have not sent yet what was computed, which a drain waits for, too."""
        return False

    def num_in_stage(self, stage: str) -> int:
        """Return the number of requests in one of its stages."""
        return self.num_requests() if stage in self.stages else 0

    @abstractmethod
    async def stop(self) -> None:
        """End all requests. Called once per start, before the engine closes."""

    def restart(self) -> None:
        """Reset the state for the next start, with a new epoch."""
        gc.unfreeze()  # the last start's objects are garbage now
        self.epoch = time.time_ns()
        self.num_starts += 1
        self.state = "starting"
        self._ready_s = 0.0
        self.events = None

    @property
    def join_s(self) -> float:
        """Seconds from this start until the node was ready."""
        return self._ready_s - self._began_s

    @abstractmethod
    def cancel(self, key: Key) -> None:
        """Stop this attempt of a request. Does nothing for an unknown one."""

    def sweep(self) -> None:
        """Drop expired leases, announce changed health. Called every SWEEP_INTERVAL_S."""
        self.store.tiers.sweep()
        if self.health.changed():
            self.publisher.announce()
        if self.health.judgement.fatal:
            self.draining.set()

    async def switch(self, role: str, limit_s: float) -> int:
        """Change the role in place; conductors learn of it at once. Pool, cache and index entries stay.

        Waits up to ``limit_s`` for the end of the requests in a stage that the role no longer has, and
        returns how many are left. They go on, as do those that a conductor places before it has learned of
        the role.

        Raises RoleUnsupported or NodeDraining; the role is unchanged then.
        """
        self.check_takes_work()
        stages = stages_of(role)
        if not stages or not set(stages) <= set(self.stages):
            raise RoleUnsupported(self.node_id, role, self.stages)
        if role != self.role:
            log.info("the role changes from %s to %s", self.role, role)
            self.role = role
            self.publisher.announce()
        ends_s = time.monotonic() + limit_s
        former = [stage for stage in self.stages if stage not in stages]
        # Polled, as by a drain.
        while (num_left := sum(map(self.num_in_stage, former))) and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return num_left

    def check_takes_work(self) -> None:
        if self.state != "ready":
            raise NodeDraining(self.node_id)

    async def prepare(self, sequence: Sequence) -> None:
        """Give the sequence the automaton of its structure, if it has one, after its output so far.

        Raises StructureInvalid, StructureUnsupported or GrammarsBusy.
        """
        structure = sequence.sampling.structure
        if structure is not None:
            output_ids = sequence.token_ids[sequence.num_prompt_tokens :]
            sequence.automaton = await self.grammars.automaton(structure, output_ids)

    @asynccontextmanager
    async def with_adapter(
        self, work: node_pb2.Work, sequence: Sequence
    ) -> AsyncGenerator[AdapterPin | None]:
        """Wait for blocks for the LoRA adapter of a request; None: it has none. Its load runs beside what is
        in the ``with``: see ``AdapterPin.give``. Raises AdapterRefused."""
        if not work.HasField("adapter"):
            yield None
            return
        wanted = work.adapter
        peer = work.adapter_source if work.adapter_source.node_id not in ("", self.node_id) else None
        ref = AdapterRef(wanted.name, wanted.digest, Path(wanted.path), wanted.rank, peer=peer)
        async with self.engine.adapters.pinned(ref, sequence) as pin:
            yield pin

    # ------------------------------------------------------------------ starts

    async def run(self, context: ServiceContext) -> None:
        """Start, announce, serve until drained, leave the index.

        When a rank is lost the node leaves the index and starts again, with new ranks and a new epoch; blocks
        on disk stay. It gives up when starts repeatedly last too short. So it does, or ends, after it has
        drained because of a slow rank, see ``engine.parallel.slow_rank``. A drain before it serves ends it at
        once.

        Raises the error that prevents a start or stopped the engine; the node has left the index then.
        """
        crashes = CrashLoop()
        while (ended := await self._run_once(context)) is not None:
            asked = context.draining.is_set() or self.draining.is_set()
            if isinstance(ended, RankLost):
                RANKS_LOST.inc()
            elif asked:
                return
            failures.count_error(ended)
            gives_up = crashes.gives_up(time.monotonic() - self._ready_s if self._ready_s else 0.0)
            if gives_up or asked or (isinstance(ended, RankSlow) and not ended.regroups):
                raise ended
            log.error("%s: node %s starts again", ended, self.node_id)
            self._ended_by = ended
            if isinstance(ended, RankSlow):
                self._regrouped_s = time.monotonic()
            self.restart()

    async def _run_once(self, context: ServiceContext) -> RankLost | RankSlow | None:
        """Run until drained; return None. Return the error when a rank is lost, or stayed slow."""
        self._began_s = time.monotonic()
        self.work_time = WorkTime(self._began_s)
        self._join = JoinPhases(first=self.num_starts == 1)
        try:
            async with AsyncExitStack() as stack:
                agent = await stack.enter_async_context(
                    await TransferAgent.start(self.config.transfer, agent_id=self.node_id, epoch=self.epoch)
                )
                redis = connect(self.config.index.redis_url)
                stack.push_async_callback(redis.aclose)
                self.index = KVIndex(redis, self.config.index.namespace)
                memory = await self._open_memory(context, agent)
                if memory is None:
                    return None
                stack.push_async_callback(memory.engine.close)
                await self._start(stack, agent, memory)
                NODE_JOIN_SECONDS.set(self.join_s)
                if (before := self._ended_by) is not None:
                    kind = SLOW if isinstance(before, RankSlow) else before.failure.value
                    REGROUP_SECONDS.labels(kind).observe(self._ready_s - self._ended_s)
                log.info("epoch %d is ready after %.2f s", self.epoch, self.join_s)
                context.ready(
                    node_id=self.node_id,
                    rpc_address=self.rpc_address,
                    metrics_url=self.metrics_url,
                    epoch=self.epoch,
                    join_s=round(self.join_s, 3),
                    **({"ranks": self.ranks} if self.engine.ranks is not None else {}),
                )
                await self._serve_until_drained(context)
                if self.health.judgement.fatal:
                    raise NodeUnfit(self.node_id, self.health.judgement.reasons)
                return self.slow_rank.found
        except RankLost as lost:
            if self.num_starts == 1 and not self._ready_s:
                raise  # the next start would fail in the same way
            if self._ready_s and self.engine.ranks is not None:
                RANK_DETECT_SECONDS.labels(lost.failure.value).observe(self.engine.ranks.silent_s)
            return lost
        return None

    async def _open_memory(self, context: ServiceContext, agent: TransferAgent) -> EngineMemory | None:
        """Return None after a drain meanwhile; everything is closed then."""
        with closing(LoadProgress(self.node_id, context.loaded)) as progress:
            watched, decodes = self._join.watch(progress), "decode" in stages_of(self.role)
            kept = partial(self.kept_experts.load, self.index)
            opening = asyncio.create_task(
                EngineMemory.open(self.config, agent, watched, decodes=decodes, kept_experts=kept),
                name="open",
            )
            asked = asyncio.create_task(context.draining.wait())
            try:
                await asyncio.wait((opening, asked), return_when=asyncio.FIRST_COMPLETED)
                return await opening if opening.done() else None
            finally:
                asked.cancel()
                await cancel_and_wait(opening)

    async def _start(self, stack: AsyncExitStack, agent: TransferAgent, memory: EngineMemory) -> None:
        """``stack`` closes everything started here, in reverse order."""
        self._join.ends("warm_up")
        config, self.agent = self.config, agent
        self.engine = engine = memory.engine
        model = engine.config
        self.grammars = Grammars(model.path, model.vocab_size, model.eos_token_ids)
        self.memory = memory.blocks
        stack.push_async_callback(self.memory.close)
        self.tenants = TenantCache(self.memory)
        self.exchange = PeerExchange(
            self.memory,
            agent,
            deadline_s=config.transfer.deadline_s,
            reader=memory.reader,
            in_parts=bool(memory.ranks),
        )
        stack.push_async_callback(self.exchange.close)
        engine.adapter_loader.from_peer = self.exchange.fill_whole
        self.adapters = AdapterRegistry(engine.config, engine.adapter_shapes, engine.adapter_reader)
        for name, path in config.lora.paths.items():
            await self.adapters.register(name, path)
        listed = config.lora.listed()
        self.health = HealthMonitor(
            config.health,
            gpus=gpu_uuids(engine.device.torch),
            disk=config.store.ssd.path,
            reserved=engine.device.reserved_nbytes,
        )
        stack.callback(self.health.close)
        self.health.start()
        index = self.index
        self.publisher = IndexPublisher(index, self.record, config.index, lambda: self.store.tiers.blocks())
        self.slow_rank = SlowRankWatch(
            Remedy(config.engine.parallel.slow_rank),
            engine.rank_times,
            index,
            self.record,
            regrouped_s=self._regrouped_s,
        )
        self.store = await NodeStore.open(
            config, self._folder, agent, engine, self.memory, self._on_tier_change
        )
        stack.push_async_callback(self.store.close, config.store.flush_s)
        # Before the store's last writes to disk, which may read the ranks' memory.
        stack.push_async_callback(engine.halt)
        server, port = await rpc.serve(self.servicers(), config.node.host, config.node.port, direct=True)
        self._server = server
        stack.push_async_callback(server.stop, 0.5)
        stack.push_async_callback(self.stop)
        self.rpc_address = host_port(config.node.host, port)
        self.kv_address = node_pb2.KvAddress(
            node_id=self.node_id,
            epoch=self.epoch,
            rpc_address=self.rpc_address,
            agent=agent.describe().pack(),
            layout_fingerprint=engine.layout.fingerprint,
            block_nbytes=engine.layout.block_nbytes,
            layout=str(engine.layout),
            ranks=memory.ranks,
        )
        if not self.metrics_url:
            page = serve_metrics(
                config.node.host, config.node.metrics_port, keyed=bool(config.conductor.tenants_path)
            )
            self.metrics_url = f"http://{host_port(config.node.host, page.port)}/metrics"
        self._identity = NodeRecord(
            node_id=self.node_id,
            epoch=self.epoch,
            role=self.role,
            host=config.node.host,
            pid=os.getpid(),
            rpc_address=self.rpc_address,
            metrics_url=self.metrics_url,
            model=engine.model_fingerprint.hex(),
            layout=engine.layout.fingerprint.hex(),
            kv_address=self.kv_address.SerializeToString(),
            replica=self.replica,
            stages=self.stages,
            region=config.node.region,
            zone=config.node.zone,
            extra={
                "version": own_version(),
                "options": agreement_of(config),
                "machine": machine_of(engine.device.torch),
                "weights": weights_dtype(engine.config, engine.dtype),
            },
        )
        stack.callback(REGISTRY.unregister, observe_engine(engine))
        stack.callback(REGISTRY.unregister, observe_stores(lambda: [("kv", self.store.tiers)]))
        stack.callback(REGISTRY.unregister, observe_tenants(self.tenants.quotas, self.tenant_labels))
        await self._start_events(stack)
        await self.grammars.warm_up()
        self.state = "ready"
        self._ready_s = time.monotonic()
        self._join.ends("services")
        stack.push_async_callback(self.publisher.close)
        await self.publisher.start()
        self._join.ends("registration")
        # After our record is there: of two that join at once, one finds the other.
        await connect_nodes(index, self.exchange, self.kv_address)
        for task in (
            vital(self._sweep(), "sweep"),
            vital(self._enforce_quotas(), "enforce quotas"),
            vital(self._refresh_expert_load(), "expert load"),
            vital(self._register(listed), "register adapters"),
            vital(self.slow_rank.run(), "slow ranks"),
            vital(agent.map_pages(), "map pages"),
        ):
            stack.callback(task.cancel)

    async def _start_events(self, stack: AsyncExitStack) -> None:
        if not self.config.events.zmq_endpoint:
            return
        rank = self.replica.number if self.replica is not None else 0
        events = EventPublisher(self.config.events, self.engine.layout.block_size, rank=rank)
        stack.push_async_callback(events.close)
        await events.start()
        self.events = events
        self.publisher.listeners.append(events)
        self.engine.observe_full_blocks(
            lambda sequence, first: events.describe(sequence.keys, sequence.token_ids, first)
        )
        log.info("KV events at %s, replay at %s", events.endpoint, events.replay_endpoint or "none")

    async def _serve_until_drained(self, context: ServiceContext) -> None:
        engine_ended = asyncio.ensure_future(self.engine.wait())
        events = (context.draining, self.draining, self.slow_rank.due)
        asked = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait([engine_ended, *asked], return_when=asyncio.FIRST_COMPLETED)
            if engine_ended.done():
                engine_ended.result()
            if self.draining.is_set():
                context.drains()
            self.state = "draining"
            self.publisher.announce()
            deadline_s = time.monotonic() + self.config.node.drain_s
            # Polled: an event would burden every request for the sake of the last second.
            while self._is_busy() and time.monotonic() < deadline_s:
                await asyncio.sleep(0.02)
                if engine_ended.done():
                    engine_ended.result()
                    break
            if left := self.num_requests():
                log.warning(
                    "not drained after %g s (node.drain_s): %d requests are cut off",
                    self.config.node.drain_s,
                    left,
                )
        finally:
            self._ended_s = time.monotonic()
            for task in (engine_ended, *asked):
                task.cancel()

    def _is_busy(self) -> bool:
        """Whether there is something that a drain waits for."""
        unread = self._server is not None and self._server.backlog_nbytes > 0
        return bool(self.num_requests()) or self.is_behind() or unread

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.sweep()

    async def _enforce_quotas(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            await self.tenants.enforce(self.store.tiers)

    async def _register(self, adapters: dict[str, Path]) -> None:
        """Know the adapters of ``lora.directory``, while the node serves. Those that are refused are left
        out."""
        for name, path in adapters.items():
            try:
                await self.adapters.register(name, path)
            except (AdapterRefused, AdapterNameTaken) as error:
                log.warning("%s is not served: %s", name, error)
        if adapters:
            log.info("%d adapters are known", len(self.adapters.refs))
            self.publisher.announce()

    async def _refresh_expert_load(self) -> None:
        while True:
            await asyncio.sleep(EXPERT_LOAD_INTERVAL_S)
            with suppress(RankLost):  # the engine reports it
                await self.engine.refresh_expert_load()

    # ------------------------------------------------------------------ the node in the index

    def record(self) -> NodeRecord:
        """Return the node's current index record."""
        stats = self.engine.stats()
        return self._identity.current(
            self.health.state(self.state),
            self.health.judgement.reasons,
            self.health.readings(),
            unix_s=self.clock(),
            role=self.role,
            load=NodeLoad(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_queued_tokens=stats.num_queued_tokens,
                num_context_tokens=stats.num_context_tokens,
                num_blocks=stats.num_blocks,
                free_blocks=stats.num_available_blocks,
                cached_blocks=stats.num_cached_blocks,
            ),
            tiers=self.store.fill(),
            profile=self.profile(),
            links=self.exchange.bandwidth(),
            extra=self._extra(),
        )

    def _extra(self) -> dict[str, Any]:
        plan = self.engine.plan
        extra: dict[str, Any] = {
            "join_s": round(self.join_s, 3),
            "join": self._join.seconds,
            "chunk_tokens": self.config.engine.max_batch_tokens,
            "num_starts": self.num_starts,
            "versions": self._versions,
            "evicted": evicted_totals(),
            "paths": path_totals(),
            "structured": not self.grammars.lacking,
            "work": self.work_time.facts(self.engine.stats().busy_s),
        }
        if self.config.node.gated:
            extra["gated"] = True
        if self.adapters.version:
            # Conductors ask for the names when the version changes.
            extra["adapters"] = [self.adapters.version, len(self.adapters.refs)]
            extra["resident_adapters"] = self.engine.adapters.digests[-_MOST_RESIDENTS:]
            extra["adapter_load_s"] = round(self.engine.adapters.load_cost_s, 4)
        if plan.world_size > 1:
            extra["ranks"] = self.ranks
            if (times := self.engine.rank_times()) is not None:
                extra["slow_rank"] = times.sentence()
                extra["better_pp_layers"] = times.better_layers()
        if self.events is not None:
            extra["kv_events"] = self.events.endpoint
        return extra

    @property
    def ranks(self) -> str:
        """Describe the ranks: "tp 1 × pp 2 on 10.0.0.1, gpu-2 (10.0.0.2)"."""
        remote = self.engine.remote_hosts
        return str(self.engine.plan) + (
            f" on {', '.join([self.config.node.host, *remote])}" if remote else ""
        )

    def profile(self) -> dict[str, float]:
        """Return this node's costs by the names of ``protos.Profile``."""
        return self.engine.published_profile() | self.store.profile()

    def _on_tier_change(self, key: BlockKey, tier: Tier | None) -> None:
        """Publish the tier of a block's fastest copy; None: no copy is left."""
        self.tenants.on_tier_change(key, tier)
        if tier is None:
            self.publisher.removed(key)
        else:
            self.publisher.stored(key, tier)
