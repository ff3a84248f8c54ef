"""Over random histories, no block of a confined tenant is ever on, or read from, a node elsewhere.

The conductor's own registry, placement, copies and moves decide; made-up nodes do as they are told.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.admission.tenants import ANYONE, Tenant
from moonpool.conductor.core import Conductor
from moonpool.conductor.fleet import member as member_module
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.placing.placement import Placement
from moonpool.conductor.requests.deadline import Deadline
from moonpool.conductor.requests.life import RequestLife
from moonpool.conductor.requests.lineage import Lineage
from moonpool.conductor.requests.placer import RequestPlacer
from moonpool.kvstore.blocks.keys import BlockKey, pack
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.mirror_state import Seen
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import ConductorOptions, IndexOptions
from tests.conductor.core_nodes import LAYOUT, MODEL, request

TENANTS = (
    ANYONE,
    Tenant("acme", regions=frozenset({"eu"})),
    Tenant("bolt", regions=frozenset({"us"})),
    Tenant("both", regions=frozenset({"eu", "uk"})),
)
REGIONS = ("eu", "us", "uk", "")
CAUSES = ("drain", "defragment", "hot-spot", "priority", "queue")


class Client:
    """Of a made-up node: does at once what it is told."""

    history: History

    def __init__(self, node_id: str, *_: Any, **__: Any) -> None:
        self.node_id, self.connected = node_id, True

    def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def abandon(self, reason: str) -> None:
        pass

    async def replicate(
        self, source: node_pb2.KvAddress, keys: Sequence[bytes], timeout_s: float, *, surplus: bool = True
    ) -> node_pb2.ReplicateReply:
        self.history.read(keys, source.node_id, self.node_id)
        self.history.num_copies += 1
        return node_pb2.ReplicateReply(num_blocks=len(keys), num_read=1, nbytes=64)

    async def evict(self, keys: Sequence[bytes], num_blocks: int, timeout_s: float) -> int:
        self.history.blocks.remove(self.node_id, pack(keys[-num_blocks:]))
        return num_blocks


class Run:
    """A running request, as decisions about moves see it."""

    priority = 0
    waits_on: tuple[Member, bool] | None = None
    prefill_key: tuple[str, int] | None = None

    def __init__(self, history: History, client: Tenant, keys: Sequence[BlockKey], member: Member) -> None:
        self.client, self.decodes_on = client, member
        self._history, self._keys = history, keys

    def place_again(self, reason: str) -> None:
        pass

    def outlook(self) -> tuple[int, int]:
        return 16 * len(self._keys), 64

    async def migrate(self, target: Member, cause: str) -> None:
        self._history.read(self._keys, self.decodes_on.node_id, target.node_id)
        self._history.num_moves += 1
        self.decodes_on = target


class Started:
    """An attempt that is not made."""

    def start(self) -> None:
        pass


class Placer(RequestPlacer):
    plan: Any = None

    def _attempt(self, plan: Any) -> Any:
        self.plan = plan
        return Started()


class History:
    """A conductor that is not started: its mirror is told what its nodes do."""

    def __init__(self, num_other_nodes: int) -> None:
        self.now_s = 0.0
        options = ConductorOptions(replicate_nbytes_per_s=1 << 40, migrate=CAUSES, slo_tbt_s=4e-3)
        index = IndexOptions(redis_url="redis://127.0.0.1:1")
        self.conductor = Conductor(MODEL, options, index, region="eu", clock=lambda: self.now_s)
        self.deps = self.conductor._deps
        self.registry = self.deps.registry
        self.mirror = self.registry.mirror._copy
        self.blocks = self.mirror.blocks
        self.owner: dict[bytes, Tenant] = {}
        self.num_placed = self.num_copies = self.num_moves = self.num_refused = 0
        self.wrong: list[str] = []
        self.before: dict[str, frozenset[bytes]] = {}  # by node: what may be there wherever that is
        self._epoch = 0
        for number in range(num_other_nodes):
            self.join(f"s{number}", "us")

    def join(self, name: str, region: str, role: str = "store") -> None:
        self._epoch += 1
        self.mirror._join(
            NodeRecord(
                name,
                self._epoch,
                role,
                layout=LAYOUT,
                model="tiny-1",
                region=region,
                kv_address=node_pb2.KvAddress(node_id=name).SerializeToString(),
                load=NodeLoad(num_blocks=4096, free_blocks=4096),
                profile={"prefill_token_s": 1.0, "decode_base_s": 1e-3, "decode_sequence_s": 1e-3},
            ),
            Seen(self._epoch, 0),
        )

    def leave(self, name: str) -> None:
        if name in self.mirror.nodes:
            self.mirror.leave(name, "expired")
            self.before.pop(name, None)
            # Its requests fail: they are placed again as others are.
            for request_id, run in list(self.deps.runs.items()):
                if run.decodes_on is None or run.decodes_on.node_id == name:
                    del self.deps.runs[request_id]

    def drain(self, name: str) -> None:
        if (member := self.registry.members.get(name)) is not None:
            self.registry._on_heartbeat(replace(member.record, state="draining"))

    def hear(self) -> None:
        """Heartbeats: what runs where."""
        running = Counter(run.decodes_on.node_id for run in self.deps.runs.values() if run.decodes_on)
        for name, member in self.registry.members.items():
            load = NodeLoad(num_blocks=4096, free_blocks=4096, num_running=running[name])
            self.registry._on_heartbeat(replace(member.record, load=load))

    def place(self, client: Tenant, number: int) -> None:
        prompt = [1000 * number + i for i in range(16 * (number + 2) + 1)]
        asked = request(f"r{self.num_placed}", prompt, client=client, tenant=client.salt(""))
        placer = Placer(
            asked,
            self.deps,
            RequestLife(max_attempts=4),
            Lineage(asked.prompt_token_ids, MODEL.block_size),
            limit=8,
            deadline=Deadline(self.now_s, wait_s=1e9, run_s=1e9, asked_s=None),
        )
        placement = placer.decide()
        if not isinstance(placement, Placement):
            self.num_refused += 1
            return
        placer.start(placement)
        placer.note(placement)
        self.num_placed += 1
        keys = placer._lineage.keys
        self.owner |= dict.fromkeys(keys, client)
        prefill = placer.plan.prefill_request
        source = prefill.fetch_from.node_id if prefill.num_fetch_blocks else ""
        self.read(keys, source, placement.prefill.node_id)
        if placement.decode is not None:
            self.read(keys, placement.prefill.node_id, placement.decode.node_id)
            member = self.registry.members[placement.decode.node_id]
            self.deps.runs[asked.request_id] = Run(self, client, keys, member)  # type: ignore[assignment]

    def read(self, keys: Sequence[bytes], source: str, target: str) -> None:
        """``target`` gets the blocks; ``source``: from there; empty: it computes them."""
        client = self.owner[keys[-1]]
        for name in filter(None, (source, target)):
            region = self.mirror.nodes[name].region
            if client.regions and region not in client.regions:
                self.wrong.append(f"of {client.name}, from {source} to {target}: {name} is in {region!r}")
        self.blocks.store(target, pack(keys), Tier.POOL)

    def leave_behind(self, name: str, client: Tenant) -> None:
        """A node has blocks of ``client`` from before that was confined."""
        if name in self.mirror.nodes:
            keys = [key for key, owner in self.owner.items() if owner is client]
            self.before[name] = self.before.get(name, frozenset()).union(keys)
            self.blocks.store(name, pack(keys), Tier.POOL)

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    def check(self) -> None:
        assert not self.wrong
        for key, client in self.owner.items():
            for name in self.blocks.longest_prefix([key]) if client.regions else ():
                is_old = key in self.before.get(name, ())
                assert is_old or self.mirror.nodes[name].region in client.regions


_NAMES = st.sampled_from(("p0", "p1", "p2", "d0", "d1", "d2", "s0"))
_ROLES = {"p": "prefill", "d": "decode", "s": "store"}
_STEPS = st.one_of(
    st.tuples(st.just("join"), _NAMES, st.sampled_from(REGIONS)),
    st.tuples(st.sampled_from(("leave", "drain", "hand on")), _NAMES, st.just("")),
    st.tuples(st.just("place"), st.integers(0, 2), st.sampled_from(TENANTS)),
    st.tuples(st.just("place"), st.integers(0, 2), st.sampled_from(TENANTS)),
    st.tuples(st.just("leave behind"), _NAMES, st.sampled_from(TENANTS)),
    st.tuples(st.sampled_from(("copy", "move")), st.just(0), st.just("")),
)
_SEEN = dict.fromkeys(("num_placed", "num_copies", "num_moves", "num_refused"), 0)


async def _play(steps: Sequence[tuple[str, Any, Any]], num_other_nodes: int) -> None:
    Client.history = history = History(num_other_nodes)
    replicator, migrator = history.deps.replicator, history.conductor._migrator
    for name, region in zip(("p0", "p1", "p2", "d0", "d1", "d2"), ("eu", "us", "eu") * 2, strict=True):
        history.join(name, region, _ROLES[name[0]])
    begin = [("place", number, client) for number in (0, 1, 0) for client in TENANTS]
    for kind, one, other in [*begin, *steps]:
        history.now_s += 0.25
        match kind:
            case "join":
                history.leave(one)
                history.join(one, other, _ROLES[one[0]])
            case "leave":
                history.leave(one)
            case "drain":
                history.drain(one)
            case "leave behind":
                history.leave_behind(one, other)
            case "hand on":
                await replicator.hand_on(one)
            case "place":
                history.place(other, one)
            case "copy":
                await replicator.round()
            case "move":
                history.hear()
                migrator.round()
        await history.settle()
        history.check()
    for name in _SEEN:
        _SEEN[name] += getattr(history, name)
    await history.registry.close()
    await history.conductor._redis.aclose()


# With more than 64 nodes, holders of a prefix are bit masks.
@pytest.mark.parametrize("num_other_nodes", [0, 66])
def test_no_block_of_a_confined_tenant_is_ever_elsewhere(
    num_other_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NodeClient", "DecodeClient"):
        monkeypatch.setattr(member_module, name, type(name, (Client,), {}))
    _SEEN.update(dict.fromkeys(_SEEN, 0))

    @settings(max_examples=100 if not num_other_nodes else 30)
    @given(st.lists(_STEPS, min_size=20, max_size=60))
    def play(steps: Sequence[tuple[str, Any, Any]]) -> None:
        asyncio.run(_play(steps, num_other_nodes))

    play()
    assert all(_SEEN.values()), f"the histories lack one kind of decision: {_SEEN}"
