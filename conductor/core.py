"""The conductor: the interface that the API uses."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from moonpool.conductor.accounts.ledger import Ledger
from moonpool.conductor.admission.adapter_shares import AdapterShares
from moonpool.conductor.admission.batch_queue import BatchQueue
from moonpool.conductor.admission.entrance import Admission
from moonpool.conductor.admission.fair_share import FairShare
from moonpool.conductor.admission.rejection import REJECTIONS
from moonpool.conductor.admission.usage import Usage
from moonpool.conductor.canary.canaries import Canaries
from moonpool.conductor.coordination.arbitration import Arbitration
from moonpool.conductor.coordination.other_conductors import OtherConductors
from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.costs.regions import RegionLinks
from moonpool.conductor.engines.configured import ConfiguredEngines
from moonpool.conductor.fleet.adapters import AdapterDirectory
from moonpool.conductor.fleet.administration import FleetAdmin
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.node_status import node_status, slow_rank_of, warnings_of
from moonpool.conductor.fleet.providers.provider import Provider
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.fleet.rollout.record import RolloutRecord
from moonpool.conductor.fleet.rollout.rollouts import Rollouts
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.migration.migrator import Migrator
from moonpool.conductor.observing.activity import Activity
from moonpool.conductor.observing.demand import ClusterDemand
from moonpool.conductor.observing.prefix_outcomes import PrefixWatch
from moonpool.conductor.observing.replica_groups import grouped, missing_replicas
from moonpool.conductor.observing.request_metrics import ClusterCounts
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.observing.timelines.timeline import RequestTimeline, TimelineRing
from moonpool.conductor.observing.transfer_paths import paths_of
from moonpool.conductor.placing.policies import POLICIES
from moonpool.conductor.planning.arbiter import Borrower
from moonpool.conductor.planning.lease import PlannerLease
from moonpool.conductor.planning.on_demand import OnDemand
from moonpool.conductor.planning.planner import ACT, PERIOD_S, Planner, rules_of
from moonpool.conductor.replication.copier import Replicator
from moonpool.conductor.replication.offers import Offers
from moonpool.conductor.request import GenerateRequest, TokenEvent
from moonpool.conductor.requests.conversation_records import ConversationRecords
from moonpool.conductor.requests.dependencies import RequestDependencies
from moonpool.conductor.requests.lifecycle import RequestRun
from moonpool.conductor.requests.migration import Migrated
from moonpool.conductor.requests.probe import Probe
from moonpool.conductor.requests.stream_records import StreamRecords
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.index.redis.changes import encode
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import STAGES
from moonpool.runtime.config.options import ConductorOptions, IndexOptions, PlannerOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import posture, process

log = logging.getLogger(__name__)

# Timelines kept; a few kilobytes each.
_TIMELINES_KEPT = 2048

# Blocks of the index that are read and encoded in one turn of the loop.
_PART_BLOCKS = 4096

# How long closing waits for requests to end and for cancels to reach nodes.
_CLOSE_WAIT_S = 1.0


class Conductor:
    """Places requests on nodes and streams their tokens. All methods are called on one event loop."""

    def __init__(
        self,
        model: ServedModel,
        options: ConductorOptions,
        index: IndexOptions,
        *,
        peer_host: str = "127.0.0.1",
        peer_port: int = 0,
        provider: Provider | None = None,
        planner: PlannerOptions | None = None,
        price: float = 1.0,
        region: str = "",
        first_roles: Sequence[str] = STAGES,
        leader: Conductor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` must run with the event loop's time. Other conductors connect to ``peer_host`` and
        ``peer_port`` (0: a free one). ``provider``: starts and stops nodes; closed here.
        ``price``: of a second of a node. ``region``: of this conductor.
        ``first_roles``: of the nodes that it starts for a model without any. ``leader``: the conductor of the
        first model, if this is another one: who plans for that one plans for all.

        Raises ``ConfigError`` without a Redis URL, or with options that cannot be read.
        """
        if not index.redis_url:
            raise ConfigError("index.redis_url is empty: say where the index is", "index.redis_url")
        self.model, self.price = model, price
        rng = random.Random()
        cost_model = CostModel(RegionLinks.parse(options.region_links, node_price=price))
        activity = Activity(time.time)
        conductor_id = f"conductor-{uuid.UUID(int=rng.getrandbits(128)).hex[:12]}"
        self._redis = connect(index.redis_url)
        kv_index = KVIndex(self._redis, index.namespace)
        registry = NodeRegistry(
            kv_index,
            index.lease_ttl_s,
            model,
            cost_model,
            activity,
            conductor_id=conductor_id,
            engine_key=options.engine_key,
            clock=clock,
            rng=rng,
        )
        self._engines = ConfiguredEngines(options.engines, model, options.engine_key, registry.join)
        admission, fair_share = Admission(options.max_requests, clock), FairShare()
        usage = Usage(admission, fair_share, clock)
        demand = ClusterDemand(activity.demand)
        arbitration = Arbitration(
            registry,
            usage,
            demand,
            conductor_id,
            lease_ttl_s=index.lease_ttl_s,
            host=peer_host,
            port=peer_port,
        )
        self._other_conductors = OtherConductors(
            kv_index, conductor_id, arbitration.peers.meet, lease_ttl_s=index.lease_ttl_s
        )
        planner = planner or PlannerOptions()
        self.adapters = AdapterDirectory(registry, model.name, time.time)
        self.fleet = FleetAdmin(
            registry, provider, model.name, clock, activity.event, planned=planner.mode == ACT
        )
        self.streams = StreamRecords(kv_index)
        self.conversations = ConversationRecords(kv_index)
        self.canaries = Canaries(kv_index, conductor_id, activity.event)  # of all models: not started here
        self.ledger = Ledger(
            kv_index, model.name, conductor_id, lambda: (one.record for one in registry.members.values())
        )
        registry.on_late = self.ledger.add_late
        self._on_demand = OnDemand(
            registry,
            self.fleet,
            PlannerLease(kv_index, conductor_id, ttl_s=index.lease_ttl_s, clock=clock, name="first_nodes"),
            roles=first_roles,
            min_warm=planner.min_warm,
            idle_s=planner.hold_s,
            activity=lambda: (demand.total.num_requests, admission.num_requests),
            clock=clock,
        )
        self.planner_lease: PlannerLease = (
            PlannerLease(kv_index, conductor_id, ttl_s=index.lease_ttl_s, clock=clock)
            if leader is None
            else leader.planner_lease
        )
        self._planner = Planner(
            registry,
            self.fleet,
            self.planner_lease,
            lambda: demand.total,
            mode=planner.mode,
            rules=rules_of(planner, supplies=provider is not None),
            slo=Slo.of(options),
            clock=clock,
            on_decision=activity.event,
            stands_back=lambda: self._on_demand.decides,
            # Renewed before it ends: each lapse is a new epoch.
            period_s=min(PERIOD_S, index.lease_ttl_s / 3),
        )
        self.borrower = Borrower(
            model.name, self._planner, self.fleet, registry, lambda: admission.num_requests
        )
        self.on_decision = activity.event
        self.describe(model=model.name, block_size=model.block_size, policy=options.policy)
        self._deps = RequestDependencies(
            conductor_id=conductor_id,
            model=model,
            registry=registry,
            arbitration=arbitration,
            cost_model=cost_model,
            activity=activity,
            admission=admission,
            timelines=TimelineRing(_TIMELINES_KEPT),
            policy=POLICIES[options.policy],
            rejection=REJECTIONS[options.rejection],
            fair_share=fair_share,
            adapter_shares=AdapterShares(),
            usage=usage,
            batch_queue=BatchQueue(),
            replicator=Replicator(
                registry,
                cost_model,
                nbytes_per_s=options.replicate_nbytes_per_s,
                block_size=model.block_size,
                clock=clock,
                on_copied=partial(activity.event, "copied"),
            ),
            prefixes=PrefixWatch(model.block_size, clock),
            ledger=self.ledger,
            price=price,
            region=region,
            slo=Slo.of(options),
            max_attempts=options.max_attempts,
            timeout_s=options.request_timeout_s,
            wait_timeout_s=options.wait_timeout_s,
            suspects=asyncio.Lock(),
            on_demand=self._on_demand,
            clock=clock,
            rng=rng,
        )
        self.offers = Offers(
            registry,
            cost_model,
            self._deps.replicator,
            nbytes_per_s=options.replicate_nbytes_per_s,
            block_size=model.block_size,
            clock=clock,
        )
        self.fleet.before_stop = self._deps.replicator.hand_on
        registry.on_newcomer = self._deps.replicator.newcomer
        self.rollouts = Rollouts(
            self.fleet,
            registry,
            RolloutRecord(kv_index, ttl_s=index.lease_ttl_s),
            Probe(self.generate, self.timeline, model.vocab_size),
            lambda: demand.total,
            clock,
            activity.event,
        )
        self._migrator = Migrator(
            registry,
            self._deps.runs,
            causes=options.migrate,
            tbt_s=self._deps.slo.tbt_s,
            block_size=model.block_size,
            clock=clock,
        )

    def describe(self, **facts: object) -> None:
        """Add facts about this conductor for others and for ``/v1/cluster``. Call before ``start``."""
        self._other_conductors.facts |= facts

    async def start(self) -> None:
        """Read the index and connect to the nodes in it. Does not wait for nodes: see ``ready``.

        Raises:
            IndexUnavailable: Redis does not answer.
            PortInUse: another process listens on the port for other conductors.
        After an error, ``close`` it.
        """
        await self._deps.registry.start()
        peers = self._deps.arbitration.peers
        await peers.start()
        self.describe(peer_address=peers.address)
        self._deps.replicator.start()
        self._planner.start()
        self._on_demand.start()
        self.rollouts.start()
        self._migrator.start()
        self._other_conductors.start()
        self.streams.start()
        self.ledger.start()
        self._engines.start()

    async def close(self) -> None:
        """Cancel all requests in flight, on nodes too, and close all connections. Idempotent."""
        self._deps.admission.close()
        # The consumers of the streams must run once, so that nodes are told.
        await self._deps.admission.emptied(_CLOSE_WAIT_S)
        await self._deps.hints.close()
        await self._engines.close()
        await self._migrator.close()
        await self._planner.close()
        await self._on_demand.close()
        await self.rollouts.close()
        await self.fleet.close()
        await self.streams.close()
        await self.ledger.close()
        await self._other_conductors.close()
        await self._deps.arbitration.peers.close()
        await self._deps.replicator.close()
        await self._deps.registry.close()
        await self._redis.aclose()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """The request's tokens: exactly once, in order, over any number of re-placements.

        Leave it with ``aclose`` (use ``contextlib.aclosing``) or by cancelling the task: either cancels the
        request on every node, without waiting for them.

        Raises (from the iteration):
            RequestRejected: nothing was computed; carries ``retry_after_s``.
            RequestInvalid: it does not fit, or a node found it invalid.
            DuplicateRequest: another request with this id is in flight.
            NoNodes, DeadlineExceeded, RequestFailed (all attempts failed), ConductorClosed: tokens streamed
                before are valid.
        """
        return RequestRun(request, self._deps).events()

    async def migrate(self, request_id: str, target: str = "", cause: str = "asked") -> Migrated:
        """Move a running request to the decode node ``target``; empty: to the one that suits it best.

        Its stream goes on without a gap or a repetition. Raises ``MigrationFailed``: it goes on where it
        was, or has ended.
        """
        return await self._migrator.migrate(request_id, target, cause)

    def timeline(self, request_id: str) -> RequestTimeline | None:
        """The timeline of a request, while it runs and for some time after; None: unknown."""
        return self._deps.timelines.get(request_id)

    async def index_blocks(self, node_id: str) -> AsyncGenerator[bytes, None]:
        """The blocks of a node in the mirror, as ``kvstore.index.redis.changes``, in batches.

        A batch takes some milliseconds; the loop serves others between them. Blocks are as of their batch.
        """
        mirror = self._deps.registry.mirror
        num_parts = min(max(mirror.num_blocks_of(node_id) // _PART_BLOCKS, 1), 256)
        for part in range(num_parts):
            held = mirror.held_by(node_id, part, num_parts)
            if held:
                yield encode({BlockKey(key): tier for key, tier in held.items()}, ())
            await asyncio.sleep(0)

    def cluster(self) -> dict[str, Any]:
        """For ``GET /v1/cluster``: nodes with their load, the index, this conductor, prediction errors."""
        registry = self._deps.registry
        mirror = registry.mirror
        now_s = self._deps.clock()
        layout = registry.layout
        nodes = []
        for node_id, member in registry.members.items():
            nodes.append(node_status(member, now_s) | {"num_index_blocks": mirror.num_blocks_of(node_id)})
            if why := registry.incompatible(member.record):
                nodes[-1] |= {"state": "incompatible", "incompatible": why}
        return {
            "conductor_id": self._deps.conductor_id,
            "model": self.model.name,
            "dtype": layout.dtype if isinstance(layout, KVLayout) else None,
            "block_size": self.model.block_size,
            "block_nbytes": layout.block_nbytes if layout else None,
            "nodes": grouped(nodes),
            "index": {"connected": mirror.connected, "lag_s": mirror.lag_s, "num_blocks": mirror.num_blocks},
            "degraded": self.ready()[1],
            "warnings": posture.warnings(process.current()),
            "num_other_conductors": self.num_others,
            "facts": self._other_conductors.facts,
            "conductors": {name: dict(facts) for name, facts in self._other_conductors.others.items()},
            "prefixes": self._deps.prefixes.to_dict(),
            "num_requests": self._deps.admission.num_requests,
            "migrations": [asdict(move) for move in self._migrator.in_flight],
            "prediction_errors": {
                name: errors.to_dict() for name, errors in self._deps.cost_model.errors.items()
            },
        }

    @property
    def nodes(self) -> Mapping[str, Member]:
        """The nodes in the index, by id."""
        return self._deps.registry.members

    @property
    def num_others(self) -> int:
        """Conductors of the same cluster that live."""
        return self._deps.arbitration.peers.num_live

    @property
    def num_successors(self) -> int:
        """Other conductors that streams can go on at when this one drains: workers drain together."""
        others, group = self._other_conductors.others, self._other_conductors.facts.get("group")
        if group is None:
            return self.num_others
        live = self._deps.arbitration.peers.live
        return sum(name in others and others[name].get("group") != group for name in live)

    @property
    def sibling_ports(self) -> list[int]:
        """Where the other workers of the same parent take questions: see ``coordination.siblings``."""
        others, group = self._other_conductors.others, self._other_conductors.facts.get("group")
        return (
            []
            if group is None
            else [int(facts["worker_port"]) for facts in others.values() if facts.get("group") == group]
        )

    @property
    def id(self) -> str:
        return self._deps.conductor_id

    @property
    def slo(self) -> Slo:
        return self._deps.slo

    @property
    def serves(self) -> bool:
        """Whether there is a node of each stage, or requests have one started."""
        available = self._deps.registry.available
        return self._on_demand.starts_nodes or all(available(stage) for stage in STAGES)

    def planner(self) -> dict[str, Any]:
        """What the planner of this conductor saw and decided last: plain JSON types."""
        return self._planner.status

    def counts(self) -> ClusterCounts:
        """Counts for metrics. Each replica counts as a node."""
        registry, counts = self._deps.registry, ClusterCounts()
        for member in registry.members.values():
            load = member.record.load
            counts.num_blocks += load.num_blocks
            counts.num_used_blocks += load.num_blocks - load.free_blocks
            state = "incompatible" if registry.incompatible(member.record) else member.state
            counts.nodes[member.record.role, state] += 1
            counts.clock_skew_s = max(counts.clock_skew_s, abs(member.clock_offset.seconds or 0.0))
        for missing in missing_replicas(member.record for member in registry.members.values()):
            counts.num_missing_replicas[missing.role] += missing.count - missing.present
        return counts

    def activity(self) -> dict[str, Any]:
        """For the dashboard: ``Activity.to_dict``, hot prefixes, transfer paths, latest predictions, SLO."""
        slo = asdict(self._deps.slo).items()
        members = self._deps.registry.members.values()
        return self._deps.activity.to_dict() | {
            "prefixes": self._deps.replicator.tree(),
            "paths": paths_of(member.record for member in members),
            "predictions": {name: errors.latest() for name, errors in self._deps.cost_model.errors.items()},
            "planner": self._planner.status,
            "slo": {name: None if math.isinf(limit_s) else limit_s for name, limit_s in slo},
        }

    def tenant_activity(self, tenant: str) -> dict[str, Any]:
        """One tenant's own counts: prompt tokens by source of their KV, and its prefixes' outcomes."""
        return {
            "tokens": dict(self._deps.activity.tenants.get(tenant, {})),
            "outcomes": self._deps.prefixes.of_tenant(tenant),
        }

    def ready(self) -> tuple[bool, list[str]]:
        """Whether requests can be served now, and sentences about what is degraded."""
        registry = self._deps.registry
        degraded = []
        serves = True
        for role in STAGES:
            if registry.available(role) == 0:
                serves = self._on_demand.starts_nodes
                degraded.append(f"no {role} node is available")
            elif registry.unhealthy(role):
                degraded.append(f"every {role} node is unhealthy, and they serve nevertheless")
        if not registry.mirror.connected:
            degraded.append(
                "Redis does not answer: the index is out of date, nodes are followed by their connections"
            )
        degraded += self._other_conductors.differences()
        degraded += self._deps.arbitration.peers.silent()
        for node_id, member in sorted(registry.members.items()):
            if why := registry.incompatible(member.record):
                degraded.append(f"node {node_id} is not used: {why}")
            elif not member.client.connected:
                degraded.append(f"node {node_id} at {member.client.address} cannot be reached")
            elif not member.healthy:
                degraded.append(f"node {node_id} is unhealthy: {'; '.join(member.record.reasons)}")
            degraded += (f"node {node_id}: {warning}" for warning in warnings_of(member.record))
            if sentence := slow_rank_of(member.record):
                degraded.append(f"node {node_id}: {sentence}")
        degraded += posture.warnings(process.current())
        for missing in missing_replicas(member.record for member in registry.members.values()):
            degraded.append(f"node {missing.node_id} has {missing.present} of its {missing.count} replicas")
        return serves, degraded
