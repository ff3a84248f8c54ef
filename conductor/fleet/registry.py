"""The nodes this conductor knows, and the view of them that placement works on."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence

from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.fleet.eligible_nodes import EligibleNodes
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.observing.activity import Activity
from moonpool.conductor.observing.bulk_evictions import EvictionWatch
from moonpool.conductor.placing.cluster_view import ClusterView
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.kvstore.blocks.keys import BlockKey, root_key
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import EXTERNAL_ROLE, NodeRecord

log = logging.getLogger(__name__)

# How long a node that left is kept, at least: for its last requests, and for cancels it has not got yet.
_LINGER_S = 30.0
# From so many nodes on, nobody writes down who holds a prefix: a shared one is held by all.
_MANY = 64


class NodeRegistry:
    """Who is there comes from the index, who can be reached from the connections.

    While Redis is lost the index keeps what it had, and connections alone tell who is alive. Members that
    serve another model, or blocks of another shape, are shown but never used.
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
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.mirror = IndexMirror(
            index,
            lease_ttl_s=lease_ttl_s,
            on_joined=self._joined,
            on_updated=self._heard,
            on_left=self._left,
            on_status=lambda sentence: activity.event("resync", "index", sentence),
            clock=clock,
        )
        self._fleets = EligibleNodes()
        self._evictions = EvictionWatch()
        self._connected = 0  # flags of the mirror's nodes that can be reached
        self._model = model
        self._layouts = model.layouts()
        self._identity: tuple[str, str] | None = None  # model and layout of the members that are used
        self._cost_model = cost_model
        self._activity = activity
        self._conductor_id = conductor_id
        self._clock = clock
        self._rng = rng
        self._members: dict[str, Member] = {}
        self._former: set[Member] = set()  # earlier lives, and nodes that left
        self._closing: set[asyncio.Task[None]] = set()
        self._changed: asyncio.Future[None] | None = None
        self._turn = 0

    async def start(self) -> None:
        """Read the index, begin to connect to its nodes. Raises ``IndexUnavailable``; nothing runs then."""
        await self.mirror.start()

    async def close(self) -> None:
        await self.mirror.close()
        members = [*self._members.values(), *self._former]
        self._members, self._former = {}, set()
        await asyncio.gather(*(member.client.close() for member in members), *self._closing)

    @property
    def members(self) -> Mapping[str, Member]:
        """Nodes in the index by id, each with its latest record."""
        return self._members

    @property
    def layout(self) -> KVLayout | None:
        """Of the blocks in this cluster; None before the first node came."""
        return self._layouts[self._identity[1]] if self._identity else None

    def root_key(self, tenant: str) -> bytes | None:
        """What the block keys of a tenant's requests start from; None before the first node came."""
        layout = self.layout
        if layout is None or self._identity is None:
            return None
        return root_key(model=self._identity[0].encode(), layout=layout, tenant=tenant)

    def incompatible(self, record: NodeRecord) -> str:
        """Why a node cannot serve here, as a sentence; empty: it can."""
        if record.role == "store" and not record.layout:
            return ""  # it holds nothing yet, and serves nothing but what it holds
        if record.layout not in self._layouts:
            return (
                f"its KV blocks are not those of {self._model.name} with {self._model.block_size} tokens "
                "a block: it runs another model, or another engine.block_size"
            )
        if record.role == "store":
            return ""
        if self._identity and (record.model, record.layout) != self._identity:
            return "it came with another revision or dtype of the model than the nodes before it"
        return ""

    def view(self, keys: Sequence[BlockKey], avoid: Collection[str]) -> ClusterView:
        """The cluster as it is now, for a request with these block keys.

        Nodes in ``avoid``, and those that warm up and have enough, are left out unless no other of their role
        is available.
        """
        now_s = self._clock()
        layout = self.layout
        prefix_blocks = self._prefixes(keys)
        self._turn += 1
        return ClusterView(
            prefill=self._fleets.of("prefill", now_s),
            decode=self._fleets.of("decode", now_s),
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

    def holders(self, keys: Sequence[BlockKey]) -> Mapping[str, int]:
        """How many leading blocks each node that can be reached holds."""
        return self._prefixes(keys)

    def fleet(self, role: str) -> NodeTable:
        """The nodes of a role that take requests now."""
        return self._fleets.of(role, self._clock())

    def stores(self) -> list[str]:
        """The store nodes that can be reached and take KV blocks like ours."""
        layout = self._identity[1] if self._identity else ""
        return [
            node_id
            for node_id, member in self._members.items()
            if member.record.role == "store"
            and member.client.connected
            and member.healthy
            and member.record.layout in ("", layout)
        ]

    async def change(self, timeout_s: float) -> None:
        """Return when a node came, went, or could be reached again; or after ``timeout_s``."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._changed,), timeout=timeout_s)

    def available(self, role: str) -> int:
        """How many nodes of a role would get requests now."""
        return self._fleets.count(role, self._clock())

    def unhealthy(self, role: str) -> bool:
        """Whether the nodes of a role that get requests are unhealthy ones, because there are no others."""
        fleet = self.fleet(role)
        return len(fleet) > 0 and not self._members[fleet[0].node_id].healthy

    def touched(self, member: Member) -> None:
        """What placement goes by has changed of ``member``."""
        if self._members.get(member.node_id) is not member or not self._used(member):
            self._fleets.drop(member)
        else:
            self._fleets.put(member, self._clock())

    # ------------------------------------------------------------------ coming and going

    def _prefixes(self, keys: Sequence[BlockKey]) -> Mapping[str, int]:
        """Without nodes that cannot be reached: their blocks can neither be used there nor fetched."""
        if len(self._members) > _MANY:
            return self.mirror.prefix_map(keys, self._connected)
        return {
            node_id: num_blocks
            for node_id, num_blocks in self.mirror.longest_prefix(keys).items()
            if (member := self._members.get(node_id)) is not None and member.client.connected
        }

    def _used(self, member: Member) -> bool:
        return (member.record.model, member.record.layout) == self._identity

    def _joined(self, record: NodeRecord) -> None:
        if record.role == EXTERNAL_ROLE:
            return  # in the index for those who ask it; not ours to call
        self._identify(record)
        if why := self.incompatible(record):
            log.warning("%s at %s is not used: %s", record.node_id, record.rpc_address, why)
        member = self._back(record) or self._new(record)
        self._activity.event("joined", record.node_id, f"{record.role} at {record.rpc_address}")
        member.view.slot = self.mirror.slot_of(record.node_id)
        self._members[record.node_id] = member
        self._reachable(member)
        if not member.healthy:
            self._health_changed(member)

    def _heard(self, record: NodeRecord) -> None:
        member = self._members.get(record.node_id)
        if member is not None:
            before = member.healthy
            member.update(record)
            if member.healthy != before:
                self._health_changed(member)
            for sentence in self._evictions.heard(record, self._clock()):
                self._activity.event("evicted", record.node_id, sentence)

    def _health_changed(self, member: Member) -> None:
        text = "; ".join(member.record.reasons) or "all its checks are within their limits again"
        kind = "healthy" if member.healthy else "unhealthy"
        log.warning("%s is %s: %s", member.node_id, kind, text)
        self._activity.event(kind, member.node_id, text)
        self.touched(member)
        self._notify()

    def _reachable(self, member: Member) -> None:
        """Its connection came up, or broke; or it is new."""
        if self._members.get(member.node_id) is member:
            flag = self.mirror.flag_of(member.node_id)
            self._connected = self._connected | flag if member.client.connected else self._connected & ~flag
        self.touched(member)
        self._notify()

    def _identify(self, record: NodeRecord) -> None:
        """The first compatible node, after a time without any, says which revision and dtype is served; store
        nodes have none.
        """
        if record.role == "store" or any(self._used(member) for member in self._members.values()):
            return
        if record.layout in self._layouts:
            self._identity = (record.model, record.layout)
            for member in self._members.values():
                self.touched(member)

    def _back(self, record: NodeRecord) -> Member | None:
        """The member of this very life, when it had only lapsed."""
        for member in self._former:
            if (member.node_id, member.record.epoch) == (record.node_id, record.epoch):
                self._former.discard(member)
                member.update(record)
                return member
        return None

    def _new(self, record: NodeRecord) -> Member:
        member = Member(
            record,
            self._cost_model,
            self._clock,
            conductor_id=self._conductor_id,
            on_reachable=self._reachable,
            on_change=self.touched,
        )
        # Among equals the one that was given the least is taken: a newcomer must not be given everything.
        peers = [m.view.num_placed for m in self._members.values() if m.record.role == record.role]
        member.view.num_placed = min(peers, default=0)
        member.client.start()
        return member

    def _left(self, record: NodeRecord, reason: str) -> None:
        member = self._members.pop(record.node_id, None)
        if member is None:
            return
        log.info("%s left: %s", record.node_id, reason)
        self._activity.event("left", record.node_id, reason)
        self._evictions.left(record.node_id)
        self._former.add(member)
        self._fleets.drop(member)
        if reason == "left":
            # It said so, and finishes what it has.
            asyncio.get_running_loop().call_later(_LINGER_S, self._drop, member)
        elif reason == "restarted":
            self._drop(member, at_once=True)
        else:
            member.client.abandon(f"its lease ended ({reason})")
            asyncio.get_running_loop().call_later(_LINGER_S, self._drop, member)
        self._notify()

    def _drop(self, member: Member, *, at_once: bool = False) -> None:
        if member not in self._former:
            return  # it came back
        if member.load.num_requests and member.client.connected and not at_once:
            asyncio.get_running_loop().call_later(_LINGER_S, self._drop, member)
            return
        self._former.discard(member)
        task = asyncio.create_task(member.client.close(), name=f"close {member.node_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _notify(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)
