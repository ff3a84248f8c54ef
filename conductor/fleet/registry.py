"""The nodes that this conductor knows, and the cluster view for placement."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moonpool.conductor.admission.tenants import EVERYWHERE, Regions, may_hold
from moonpool.conductor.costs.learned import LearnedCosts
from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.engines.compatibility import why_not
from moonpool.conductor.fleet.eligible_nodes import EligibleByRegions, EligibleNodes
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.other_layouts import OtherLayouts
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.observing.activity import Activity
from moonpool.conductor.observing.bulk_evictions import EvictionWatch
from moonpool.conductor.placing.cluster_view import ClusterView
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.kvstore.blocks.keys import BlockKey, KeyChain, RootedChain, root_key, tenant_secret
from moonpool.kvstore.blocks.layout import BlockFormat, KVLayout, OpaqueLayout
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.engine_facts import EngineFacts, facts_of
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import EXTERNAL_ROLE, NodeRecord, stages_of
from moonpool.runtime.security import process

log = logging.getLogger(__name__)

# A node that left is kept at least this long, for its last requests and undelivered cancels.
_LINGER_S = 30.0
# From this many nodes on, holders of a prefix are groups instead of names: all may hold a shared one.
_MANY = 64


class NodeRegistry:
    """Nodes come from the index; their liveness comes from connections.

    Without Redis the index stays as it was, and connections alone tell liveness. Nodes with another model or
    block layout are shown but never used.
    """

    def __init__(
        self,
        index: KVIndex,
        lease_ttl_s: float,
        model: ServedModel,
        cost_model: CostModel,
        activity: Activity,
        *,
        conductor_id: str,
        engine_key: str = "",
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """``engine_key``: what the servers of vLLM engines ask for."""
        self.mirror = IndexMirror(
            index,
            lease_ttl_s=lease_ttl_s,
            on_joined=self.join,
            on_updated=self._on_heartbeat,
            on_left=self._on_left,
            on_status=lambda sentence: activity.event("resync", "index", sentence),
            clock=clock,
        )
        self._fleets = EligibleByRegions()
        self._evictions = EvictionWatch()
        self._connected: dict[str, int] = {}  # mirror flags of reachable nodes, by region
        self._model = model
        self._layouts: dict[str, BlockFormat] = dict(model.layouts())
        self._others = OtherLayouts(self.mirror, self._layouts)
        self._engine_key = engine_key
        self._learned = LearnedCosts()
        self._engine: EngineFacts | None = None  # of the first engine in use: all have its keys
        self._identity: tuple[str, str] | None = None  # model and layout of the nodes in use
        self._tenants_secret = b""  # empty until a tenant needs it
        self._cost_model = cost_model
        self._activity = activity
        self._conductor_id = conductor_id
        self._clock = clock
        self._rng = rng
        self._members: dict[str, Member] = {}
        self._former: set[Member] = set()  # earlier incarnations, and nodes that left
        self._closing: set[asyncio.Task[None]] = set()
        self._changed: asyncio.Future[None] | None = None
        self._turn = 0
        # Called with seconds that a node took for a request that has ended.
        self.on_late: Callable[[float], None] = lambda seconds: None
        # Called with a prefill node that joins: the copies to await before it gets requests; None: none.
        self.on_newcomer: Callable[[str], Awaitable[object] | None] = lambda node_id: None

    async def start(self) -> None:
        """Read the index and connect to its nodes. Raises ``IndexUnavailable``; nothing runs then."""
        await self.mirror.start()

    async def close(self) -> None:
        await self.mirror.close()
        members = [*self._members.values(), *self._former]
        self._members, self._former = {}, set()
        await asyncio.gather(*(member.client.close() for member in members), *self._closing)

    @property
    def members(self) -> Mapping[str, Member]:
        """Nodes in the index, by id."""
        return self._members

    @property
    def layout(self) -> BlockFormat | None:
        """The block layout of this cluster; None before the first node joined."""
        return self._layouts[self._identity[1]] if self._identity else None

    @property
    def identity(self) -> tuple[str, str] | None:
        """Model, with its revision, and layout of the nodes in use; None before the first node joined."""
        return self._identity

    def root_key(self, tenant: str) -> bytes | None:
        """The root of a tenant's block keys; None before the first node joined."""
        chain = self.chain(tenant)
        return None if chain is None else chain.root

    def chain(self, tenant: str, adapter: str = "") -> KeyChain | None:
        """How the blocks of a tenant and a LoRA adapter are named; None before the first node joined.

        ``adapter``: what names its content; empty: none.
        """
        layout = self.layout
        if layout is None or self._identity is None:
            return None
        if self._engine is not None:
            return self._engine.chain(self.salt(tenant))
        assert isinstance(layout, KVLayout)
        secret = self._tenant_secret(tenant)
        model = self._identity[0].encode()
        return RootedChain(root_key(model=model, layout=layout, adapter=adapter, tenant=secret))

    def salt(self, tenant: str) -> str:
        """A tenant's ``cache_salt`` on engines of other projects; empty: no tenant."""
        return self._tenant_secret(tenant).hex()

    def _tenant_secret(self, tenant: str) -> bytes:
        if tenant and not self._tenants_secret:
            self._tenants_secret = process.current().derived_key("roots of tenants")
        return tenant_secret(self._tenants_secret, tenant)

    def in_other_layout(self, tenant: str, token_ids: npt.NDArray[np.int32], after: int) -> bool:
        """Whether a node that is not used here has more than the first ``after`` tokens of this prompt."""
        secret, salt = self._tenant_secret(tenant), self.salt(tenant)
        return self._others.have(token_ids, after, secret=secret, salt=salt)

    def incompatible(self, record: NodeRecord) -> str:
        """The reason why a node cannot serve here, as a sentence; empty: it can."""
        if record.role == "store" and not record.layout:
            return ""  # it has no blocks yet
        if why := why_not(record, self._model):
            return why
        if record.layout not in self._layouts:
            return (
                f"its KV blocks are not those of {self._model.name} with {self._model.block_size} tokens "
                "a block: it runs another model, or another engine.block_size"
            )
        if record.role == "store":
            return ""
        if self._identity and (record.model, record.layout) != self._identity:
            return "it has another revision or dtype of the model than the nodes before it"
        return ""

    def view(
        self,
        keys: Sequence[BlockKey],
        avoid: Collection[str],
        only: str = "",
        regions: Regions = EVERYWHERE,
    ) -> ClusterView:
        """The cluster as it is now, for a request with these block keys. ``only``: a node, or one with
        replicas, that the stages which it serves go to, whether it gets requests or not.

        ``regions``: that its tenant is confined to. Nodes elsewhere are not in the view, nor their blocks.
        """
        now_s = self._clock()
        layout = self.layout
        prefix_blocks = self.holders(keys, regions)
        self._turn += 1
        return ClusterView(
            prefill=self._of("prefill", only, avoid, now_s, regions),
            decode=self._of("decode", only, avoid, now_s, regions),
            prefix_blocks=prefix_blocks,
            slow_blocks=self.mirror.slow_blocks(keys, prefix_blocks),
            links=self._cost_model.links,
            block_size=self._model.block_size,
            block_nbytes=layout.block_nbytes if layout else 0,
            now_s=now_s,
            turn=self._turn - 1,
            draw=self._rng.random(),
            avoid=avoid,
        )

    def _of(self, stage: str, only: str, avoid: Collection[str], now_s: float, regions: Regions) -> NodeTable:
        chosen = [
            member.view
            for member in (self._members.values() if only else ())
            if member.owner == only and stage in stages_of(member.record.role)
            if member.serves(now_s) and self._used(member) and may_hold(regions, member.record.region)
        ]
        return NodeTable(chosen) if chosen else self._eligible(regions).of(stage, now_s, avoid)

    def _eligible(self, regions: Regions = EVERYWHERE) -> EligibleNodes:
        used = filter(self._used, self._members.values())
        return self._fleets.within(regions, used, self._clock())

    def open(self, member: Member) -> None:
        """Let requests go to a node that a rollout has watched. Idempotent."""
        member.gated = False
        self.touched(member)
        self._notify()

    def holders(self, keys: Sequence[BlockKey], regions: Regions = EVERYWHERE) -> Mapping[str, int]:
        """Leading blocks on each reachable node in ``regions``: those on others can neither be used nor
        fetched."""
        if len(self._members) > _MANY:
            flags = 0
            for region, connected in self._connected.items():
                flags |= connected if may_hold(regions, region) else 0
            return self.mirror.prefix_map(keys, flags)
        return {
            node_id: num_blocks
            for node_id, num_blocks in self.mirror.longest_prefix(keys).items()
            if (member := self._members.get(node_id)) is not None and member.client.connected
            if may_hold(regions, member.record.region)
        }

    def fleet(self, role: str, regions: Regions = EVERYWHERE) -> NodeTable:
        """The nodes of a role that requests may go to now."""
        return self._eligible(regions).of(role, self._clock())

    def serving(self, stage: str) -> list[NodeView]:
        """The nodes of a stage that requests may move to now, also those that warm up."""
        return self._eligible().serving(stage, self._clock())

    def computing(self) -> list[Member]:
        """The nodes with our engine and the model in use, whatever their state."""
        return [one for one in self._members.values() if one.engine is None and self._used(one)]

    def stores(self, regions: Regions = EVERYWHERE) -> list[str]:
        """Reachable, healthy store nodes with our block layout."""
        layout = self._identity[1] if self._identity else ""
        return [
            node_id
            for node_id, member in self._members.items()
            if member.record.role == "store"
            and member.client.connected
            and member.healthy
            and member.record.layout in ("", layout)
            and may_hold(regions, member.record.region)
        ]

    async def change(self, timeout_s: float) -> None:
        """Return when a node joined, left or became reachable, or after ``timeout_s``."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._changed,), timeout=timeout_s)

    def available(self, role: str) -> int:
        """Number of nodes of a role that requests may go to now."""
        return self._eligible().count(role, self._clock())

    def unhealthy(self, role: str) -> bool:
        """Whether only unhealthy nodes of a role are left."""
        fleet = self.fleet(role)
        return len(fleet) > 0 and not self._members[fleet[0].node_id].healthy

    def touched(self, member: Member) -> None:
        """The view of ``member`` has changed."""
        if self._members.get(member.node_id) is not member or not self._used(member):
            self._fleets.drop(member)
        else:
            self._fleets.put(member, self._clock())

    # ------------------------------------------------------------------ joining and leaving

    def _used(self, member: Member) -> bool:
        return (member.record.model, member.record.layout) == self._identity

    def join(self, record: NodeRecord) -> None:
        """A node is here, whether the index or the configuration says so."""
        if record.role == EXTERNAL_ROLE:
            return  # its blocks are in the index, but it has no RPC of ours
        self._identify(record)
        why = self.incompatible(record)
        self._others.joined(record, why)
        if why:
            log.warning("%s at %s is not used: %s", record.node_id, record.rpc_address, why)
        member = self._rejoined(record) or self._new(record)
        self._activity.event("joined", record.node_id, f"{record.role} at {record.rpc_address}")
        member.view.slot = self.mirror.slot_of(record.node_id)
        self._members[record.node_id] = member
        self._identify_anew()  # members may have gone with it: a former life, another node at its address
        self._reachable(member)
        if not member.healthy:
            self._health_changed(member)

    def _on_heartbeat(self, record: NodeRecord) -> None:
        member = self._members.get(record.node_id)
        if member is not None:
            before, role = member.healthy, member.record.role
            member.update(record)
            if record.role != role:
                self._activity.event("switched", record.node_id, f"from {role} to {record.role}")
                self._notify()
            if member.healthy != before:
                self._health_changed(member)
            for sentence in self._evictions.on_heartbeat(record, self._clock()):
                self._activity.event("evicted", record.node_id, sentence)

    def _health_changed(self, member: Member) -> None:
        text = "; ".join(member.record.reasons) or "all its checks are within their limits again"
        kind = "healthy" if member.healthy else "unhealthy"
        log.warning("%s is %s: %s", member.node_id, kind, text)
        self._activity.event(kind, member.node_id, text)
        self.touched(member)
        self._notify()

    def _reachable(self, member: Member) -> None:
        """``member`` is new, or its connection came up or broke."""
        if self._members.get(member.node_id) is member:
            flag, region = self.mirror.flag_of(member.node_id), member.record.region
            # A flag may have been that of a node elsewhere, which has left.
            self._connected = {name: flags & ~flag for name, flags in self._connected.items()}
            if member.client.connected:
                self._connected[region] = self._connected.get(region, 0) | flag
            member.adapters.see(member.record.extra.get("adapters"))
            if member.client.connected and member.warming is None:
                self._warm(member)
        self.touched(member)
        self._notify()

    def _warm(self, member: Member) -> None:
        """Give a prefill node the hottest prefixes before requests, if others serve meanwhile."""
        member.warming = False
        if member.engine is not None or "prefill" not in stages_of(member.record.role):
            return
        copies = self.on_newcomer(member.node_id) if len(self.fleet("prefill")) else None
        if copies is None:
            return
        member.warming = True

        async def warm() -> None:
            try:
                await copies
            finally:
                member.warming = False
                self.touched(member)
                self._notify()

        task = asyncio.create_task(warm(), name=f"warm {member.node_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _identify(self, record: NodeRecord) -> None:
        """The first compatible node that is not a store determines the revision and dtype in use."""
        if record.role == "store" or any(self._used(member) for member in self._members.values()):
            return
        engine = facts_of(record) if not why_not(record, self._model) else None
        if engine is not None:
            self._layouts[record.layout] = OpaqueLayout(
                engine.block_nbytes, bytes.fromhex(engine.fingerprint)
            )
        if record.layout in self._layouts:
            self._engine = engine
            self._identity = (record.model, record.layout)
            for member in self._members.values():
                self.touched(member)
                self._others.joined(member.record, self.incompatible(member.record))

    def _identify_anew(self) -> None:
        """Another revision may be here, and none of the one in use any more."""
        if any(map(self._used, self._members.values())):
            return
        for member in list(self._members.values()):
            self._identify(member.record)

    def _rejoined(self, record: NodeRecord) -> Member | None:
        """The former member of this incarnation, if its lease had only lapsed."""
        for member in self._former:
            if (member.node_id, member.record.epoch) == (record.node_id, record.epoch):
                self._former.discard(member)
                member.update(record)
                return member
        return None

    def _new(self, record: NodeRecord) -> Member:
        engine = None if why_not(record, self._model) else facts_of(record)
        if engine is None and record.rpc_address:  # engines that are configured may be behind one address
            self._end_others_at(record)
        member = Member(
            record,
            self._cost_model,
            self._clock,
            conductor_id=self._conductor_id,
            on_reachable=self._reachable,
            on_change=self.touched,
            on_late=lambda seconds: self.on_late(seconds),
            engine=engine,
            learned=None if engine is None else self._learned,
            engine_key=self._engine_key,
        )
        # Ties go to the node with the fewest placements: start at the fewest of the peers, not at 0.
        peers = [m.view.num_placed for m in self._members.values() if m.record.role == record.role]
        member.view.num_placed = min(peers, default=0)
        member.client.start()
        return member

    def _end_others_at(self, record: NodeRecord) -> None:
        """End the members at a new one's address: their processes are gone. Their clients would connect to
        the new one, and take its tokens."""
        everyone = (*self._former, *self._members.values())
        for other in [one for one in everyone if one.record.rpc_address == record.rpc_address]:
            if self._members.get(other.node_id) is other:
                flag = self.mirror.flag_of(other.node_id)
                self._connected = {name: flags & ~flag for name, flags in self._connected.items()}
                self._on_left(other.record, f"{record.node_id} has its address")
            self._drop(other, at_once=True)

    def _on_left(self, record: NodeRecord, reason: str) -> None:
        member = self._members.pop(record.node_id, None)
        if member is None:
            return
        log.info("%s left: %s", record.node_id, reason)
        self._others.left(record.node_id)
        self._activity.event("left", record.node_id, reason)
        self._evictions.left(record.node_id)
        self._cost_model.links.place(record.node_id, "")
        self._former.add(member)
        self._fleets.drop(member)
        if reason == "left":
            self._identify_anew()
            # A clean shutdown: it finishes its requests.
            asyncio.get_running_loop().call_later(_LINGER_S, self._drop, member)
        elif reason == "restarted":
            self._drop(member, at_once=True)
        else:
            member.client.abandon(f"its lease ended ({reason})")
            asyncio.get_running_loop().call_later(_LINGER_S, self._drop, member)
        self._notify()

    def _drop(self, member: Member, *, at_once: bool = False) -> None:
        if member not in self._former:
            return  # it has rejoined
        if member.load.num_requests and member.client.connected and not at_once:
            asyncio.get_running_loop().call_later(_LINGER_S, self._drop, member)
            return
        self._former.discard(member)
        if not at_once:
            self._identify_anew()
        task = asyncio.create_task(member.client.close(), name=f"close {member.node_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _notify(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)
