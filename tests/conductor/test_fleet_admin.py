"""Changes of the fleet by operators: which nodes start and stop, and what happens when a provider fails."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool.conductor.fleet.administration import FleetAdmin
from moonpool.conductor.fleet.errors import FleetUnchanged, NodeMissing, ProviderFailed
from moonpool.conductor.fleet.providers.provider import FAILED, RUNNING, STARTING, STOPPING, SuppliedNode
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.fleet.removal import Removable, Reuse, least_missed
from moonpool.conductor.fleet.rollout.record import ROLLING_BACK, Replacement, RolloutStatus
from moonpool.conductor.fleet.rollout.record import RUNNING as RUNNING_ROLLOUT
from moonpool.conductor.fleet.rollout.steps import RolloutSteps, Stopped
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import PlannerOptions
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.replicas.identity import Replica


@dataclass
class FakeProvider:
    """Nodes in a dict. It fails from the call on that ``fails_at`` counts down to."""

    nodes: dict[str, SuppliedNode] = field(default_factory=dict)
    fails_at: int = -1
    name: str = "fake"

    def _count(self) -> None:
        if self.fails_at == 0:
            raise ProviderFailed("the provider is away")
        self.fails_at -= 1

    async def start(self, role: str, model: str, fence: int = 0) -> str:
        self._count()
        node_id = f"{role}-{len(self.nodes)}"
        self.nodes[node_id] = SuppliedNode(node_id, role, STARTING)
        return node_id

    async def stop(self, node_id: str, fence: int = 0) -> None:
        self._count()
        self.nodes[node_id] = SuppliedNode(node_id, self.nodes[node_id].role, STOPPING)

    async def list(self) -> Sequence[SuppliedNode]:
        return list(self.nodes.values())

    async def close(self) -> None:
        pass


class Drained:
    connected = True

    def __init__(self) -> None:
        self.num_drains = 0
        self.roles: list[str] = []
        self.error: MoonpoolError | None = None

    async def switch(self, role: str) -> node_pb2.SwitchReply:
        if self.error is not None:
            raise self.error
        self.roles.append(role)
        return node_pb2.SwitchReply(num_left=3)

    async def drain(self) -> None:
        self.num_drains += 1


@dataclass
class FakeMember:
    record: NodeRecord
    reuse: Reuse = field(default_factory=Reuse)
    client: Drained = field(default_factory=Drained)
    state: str = "ready"

    @property
    def node_id(self) -> str:
        return self.record.node_id

    @property
    def owner(self) -> str:
        return self.record.replica.node_id if self.record.replica else self.node_id


def running(*names: str) -> FakeProvider:
    nodes = {name: SuppliedNode(name, name.rpartition("-")[0], RUNNING) for name in names}
    return FakeProvider(nodes)


def admin(provider: FakeProvider | None, *members: FakeMember) -> tuple[FleetAdmin, list[tuple[str, str]]]:
    changes: list[tuple[str, str]] = []
    registry = SimpleNamespace(members={member.node_id: member for member in members})
    made = FleetAdmin(
        cast(NodeRegistry, registry),
        provider,
        "tiny",
        lambda: 10.0,
        lambda kind, node, why: changes.append((kind, node)),
    )
    return made, changes


def member(node_id: str, *, reused: float = 0.0, num_running: int = 0) -> FakeMember:
    role = node_id.rpartition("-")[0]
    one = FakeMember(NodeRecord(node_id, 1, role, load=NodeLoad(num_running=num_running)))
    one.reuse.add(reused, 10.0)
    return one


async def test_scaling_starts_what_is_missing_and_stops_what_is_reused_least() -> None:
    provider = running("decode-0", "decode-1", "decode-2", "prefill-0")
    provider.nodes["decode-9"] = SuppliedNode("decode-9", "decode", FAILED, "it ended")
    fleet, changes = admin(
        provider, member("decode-0", reused=50), member("decode-1", reused=7), member("decode-2", reused=90)
    )
    assert (await fleet.scale("decode", 3))["started"] == []
    done = await fleet.scale("decode", 2)
    assert (done["started"], done["stopped"]) == ([], ["decode-1"])
    assert provider.nodes["decode-1"].state == STOPPING
    done = await fleet.scale("decode", 4)  # the one that drains does not count
    assert (len(done["started"]), done["stopped"]) == (2, [])
    assert [kind for kind, _ in changes] == ["drained", "started", "started"]


async def test_a_node_switches_if_it_can() -> None:
    one, stuck = member("decode-0"), member("decode-1")
    one.record = replace(one.record, stages=("prefill", "decode"))
    fleet, changes = admin(None, one, stuck)
    done = await fleet.switch_role("decode-0", "prefill")
    assert done == {"node_id": "decode-0", "role": "prefill", "former": "decode", "num_requests": 3}
    assert (one.client.roles, changes) == (["prefill"], [("switches", "decode-0")])
    for role in ("prefill", "store", "both", "x" * 1000):
        with pytest.raises(FleetUnchanged):
            await fleet.switch_role("decode-1", role)
    with pytest.raises(NodeMissing):
        await fleet.switch_role("decode-7", "prefill")
    one.client.error = MoonpoolError("it drains")
    with pytest.raises(ProviderFailed, match="decode-0 did not become a both node: it drains"):
        await fleet.switch_role("decode-0", "both")
    assert stuck.client.roles == []


async def test_a_node_that_was_switched_counts_for_its_new_role() -> None:
    """Its provider knows it by the role that it was started with."""
    moved = member("decode-1")
    moved.record = replace(moved.record, role="prefill")
    provider = running("decode-0", "decode-1", "prefill-0")
    fleet, _ = admin(provider, member("decode-0"), moved, member("prefill-0"))
    assert (await fleet.scale("prefill", 2))["started"] == []
    assert (await fleet.scale("decode", 2))["started"] == ["decode-3"]


async def test_a_node_hands_its_blocks_on_before_its_provider_ends_it() -> None:
    provider = running("decode-0", "decode-1")
    fleet, _ = admin(provider, member("decode-0"), member("decode-1", reused=1))
    seen: list[tuple[str, str]] = []

    async def hand_on(node_id: str) -> None:
        seen.append((node_id, provider.nodes[node_id].state))

    fleet.before_stop = hand_on
    await fleet.scale("decode", 1)
    await fleet.drain("decode-1")
    assert seen == [("decode-0", RUNNING), ("decode-1", RUNNING)]


async def test_a_node_that_has_not_joined_is_stopped_first() -> None:
    provider = running("decode-0", "decode-1")
    fleet, _ = admin(provider, member("decode-0"))
    assert (await fleet.scale("decode", 1))["stopped"] == ["decode-1"]


async def test_a_provider_that_fails_midway_tells_what_was_done() -> None:
    provider = running("prefill-0")
    provider.fails_at = 2
    fleet, changes = admin(provider)
    with pytest.raises(ProviderFailed, match="Changed before: prefill-1, prefill-2"):
        await fleet.scale("prefill", 5)
    assert len(changes) == 2
    provider.fails_at = -1
    assert len((await fleet.scale("prefill", 5))["started"]) == 2  # the rest, not all again


@pytest.mark.parametrize(("role", "count"), [("router", 1), ("store", 2), ("decode", 0), ("decode", 1025)])
async def test_what_cannot_be_is_refused(role: str, count: int) -> None:
    fleet, changes = admin(running("decode-0"))
    with pytest.raises(FleetUnchanged):
        await fleet.scale(role, count)
    assert changes == []


async def test_without_a_provider_nodes_drain_themselves() -> None:
    node = member("decode-0")
    fleet, changes = admin(None, node)
    with pytest.raises(FleetUnchanged, match="no provider"):
        await fleet.scale("decode", 2)
    assert await fleet.drain("decode-0") == {"node_id": "decode-0", "by": "node"}
    assert (node.client.num_drains, changes) == (1, [("drained", "decode-0")])
    with pytest.raises(NodeMissing):
        await fleet.drain("decode-7")


async def test_a_supplied_node_is_drained_by_its_provider_so_that_it_stays_away() -> None:
    provider, node = running("decode-0"), member("decode-0")
    fleet, changes = admin(provider, node)
    for _ in range(2):  # the second call changes nothing
        assert (await fleet.drain("decode-0"))["by"] == "fake"
    assert (node.client.num_drains, changes) == (0, [("drained", "decode-0")])
    assert provider.nodes["decode-0"].state == STOPPING


async def test_a_replica_that_is_drained_is_its_whole_node_at_the_provider() -> None:
    provider, replicas = running("decode-0"), [member("decode-0.0"), member("decode-0.1")]
    for number, one in enumerate(replicas):
        one.record = replace(one.record, replica=Replica("decode-0", number, 2))
    fleet, changes = admin(provider, *replicas)
    assert await fleet.drain("decode-0.1") == {"node_id": "decode-0", "by": "fake"}
    assert provider.nodes["decode-0"].state == STOPPING, "it is not started again"
    assert ([one.client.num_drains for one in replicas], changes) == ([0, 0], [("drained", "decode-0")])


async def test_the_list_shows_nodes_of_the_index_and_of_the_provider() -> None:
    provider = running("decode-0", "decode-1")
    fleet, _ = admin(provider, member("decode-0", num_running=3), member("prefill-7"))
    found: dict[str, Any] = {node["node_id"]: node for node in (await fleet.listed())["nodes"]}
    assert found["decode-0"]["num_requests"] == 3
    assert found["decode-1"]["states"] == []
    assert found["decode-1"]["supplied"]["state"] == RUNNING
    assert found["prefill-7"]["supplied"] is None


def test_the_order_of_removal() -> None:
    nodes = [
        Removable("decode-2", reused=5.0),
        Removable("decode-10", reused=5.0),
        Removable("decode-3", reused=5.0, num_requests=1),
        Removable("decode-4", reused=4.0, num_requests=9),
        Removable("decode-5", reused=99.0, serves=False),
    ]
    order = [node.node_id for node in least_missed(nodes)]
    assert order == ["decode-5", "decode-4", "decode-10", "decode-2", "decode-3"]


def test_old_reuse_counts_less() -> None:
    reuse = Reuse()
    reuse.add(64.0, 0.0)
    assert reuse.total(0.0) == 64.0
    assert reuse.total(300.0) == pytest.approx(32.0)
    reuse.add(1.0, 600.0)
    assert reuse.total(600.0) == pytest.approx(17.0)


@dataclass
class Switching(FakeProvider):
    """``switched``: what it was asked."""

    switched: list[tuple[str, str, str, int]] = field(default_factory=list)

    async def switch(self, node_id: str, role: str, model: str, fence: int = 0) -> None:
        self._count()
        self.switched.append((node_id, role, model, fence))


async def test_a_node_changes_its_model_where_its_provider_does_that() -> None:
    provider = Switching(dict(running("decode-0", "decode-1").nodes))
    fleet, changes = admin(
        provider, member("decode-0", num_running=3), member("decode-1"), member("decode-7")
    )
    other, _ = admin(provider)
    other.model = "other"
    told: list[str] = []

    async def hand_on(node_id: str) -> None:
        told.append(node_id)

    fleet.before_stop = hand_on
    done = await fleet.switch_model("decode-0", other)
    assert done == {
        "node_id": "decode-0",
        "model": "other",
        "former": "tiny",
        "num_requests": 3,
        "num_left": 2,
    }
    assert provider.switched == [("decode-0", "decode", "other", 0)]
    assert (changes, told) == ([("switches", "decode-0")], ["decode-0"])
    with pytest.raises(FleetUnchanged, match="decode-1 serves tiny already"):
        await fleet.switch_model("decode-1", fleet)
    with pytest.raises(FleetUnchanged, match="started by others"):
        await fleet.switch_model("decode-7", other)
    with pytest.raises(NodeMissing):
        await fleet.switch_model("decode-9", other)
    provider.fails_at = 0
    with pytest.raises(ProviderFailed):
        await fleet.switch_model("decode-1", other)
    assert len(changes) == 1


@pytest.mark.parametrize("provider", [running("decode-0"), None])
async def test_a_provider_that_cannot_switch_says_what_to_do_instead(provider: FakeProvider | None) -> None:
    fleet, changes = admin(provider, member("decode-0"))
    other, _ = admin(provider)
    other.model = "other"
    with pytest.raises(FleetUnchanged, match="start one of other, then drain decode-0"):
        await fleet.switch_model("decode-0", other)
    assert changes == []


async def test_where_a_planner_of_either_model_acts_operators_switch_no_node() -> None:
    provider = Switching(dict(running("decode-0").nodes))
    fleet, _ = admin(provider, member("decode-0"))
    other, _ = admin(provider)
    other.model, other._planned = "other", True
    with pytest.raises(FleetUnchanged, match=r"planner\.mode=act"):
        await fleet.switch_model("decode-0", other)
    assert provider.switched == []


@pytest.mark.parametrize("role", ["prefill", "decode", "both", "store"])
async def test_a_refusal_because_a_planner_acts_names_options_that_exist(role: str) -> None:
    fleet, _ = admin(running(f"{role}-0"), member(f"{role}-0"))
    fleet._planned = True
    other, _ = admin(None)
    with pytest.raises(FleetUnchanged, match=rf"how many {role} nodes") as refused:
        await fleet.switch_model(f"{role}-0", other)
    named = set(re.findall(r"planner\.(\w+)", str(refused.value)))
    assert {"mode"} < named <= {option.name for option in fields(PlannerOptions)}


@dataclass
class Served(FakeMember):
    """``is_open``: its gate has passed."""

    is_open: bool = True
    healthy: bool = True
    breaker: Any = field(default_factory=lambda: SimpleNamespace(closed=lambda now_s: True))

    def serves(self, now_s: float) -> bool:
        return True

    def available(self, now_s: float) -> bool:
        return self.is_open


@dataclass
class Versioned(FakeProvider):
    """Nodes join ``members`` at once, and end at once. Those with settings of their own join gated.

    ``told``: raised by the next start, which has its effect nevertheless. ``num_replicas``: of each node, of
    which the first one joins.
    """

    members: dict[str, Served] = field(default_factory=dict)
    num_started: int = 0
    num_replicas: int = 1
    told: BaseException | None = None

    def join(self, node_id: str, number: int, *, is_open: bool) -> None:
        role = self.nodes[node_id].role
        replica = Replica(node_id, number, self.num_replicas) if self.num_replicas > 1 else None
        name = replica.replica_id if replica else node_id
        self.members[name] = Served(NodeRecord(name, 1, role, replica=replica), is_open=is_open)

    async def start(
        self, role: str, model: str, fence: int = 0, *, settings: Sequence[str] = (), rollout: int = 0
    ) -> str:
        node_id = f"{role}-{self.num_started}"
        self.num_started += 1
        self.nodes[node_id] = SuppliedNode(node_id, role, RUNNING)
        self.join(node_id, 0, is_open=not settings)
        told, self.told = self.told, None
        if told is not None:
            raise told
        return node_id

    async def stop(self, node_id: str, fence: int = 0, *, rollout: int = 0) -> None:
        del self.nodes[node_id], self.members[node_id]

    async def settle(self, settings: Sequence[str]) -> None:
        raise AssertionError("the rollout did not end")

    def steps(
        self, status: RolloutStatus, saves: list[dict[str, Any]], aborted: Callable[[], bool] = lambda: False
    ) -> RolloutSteps:
        """``saves``: each status that was written."""
        registry = cast(NodeRegistry, SimpleNamespace(members=self.members, incompatible=lambda record: ""))
        fleet = FleetAdmin(registry, self, "tiny", time.monotonic, lambda kind, node, why: None)

        async def probe(node_id: str) -> float:
            return 0.01

        async def saved() -> None:
            saves.append(status.to_dict())

        return RolloutSteps(status, 1, fleet, self, registry, probe, time.monotonic, saved, aborted)


async def test_a_rollout_that_is_aborted_before_the_former_node_drains_starts_no_other() -> None:
    provider = Versioned()
    former = await provider.start("decode", "tiny")
    status = RolloutStatus(RUNNING_ROLLOUT, ("engine.max_batch_size=8",))
    steps = provider.steps(status, [], aborted=lambda: status.moves[0].state == "draining")
    with pytest.raises(Stopped, match="an operator aborted it"):
        await steps.replace_all()
    assert len(provider.nodes) == 2, "it waited until requests go to the newcomer"
    await steps.roll_back()
    assert list(provider.nodes) == [former]


async def test_a_rollout_that_is_aborted_while_its_last_node_ends_is_not_done() -> None:
    provider = Versioned()
    await provider.start("decode", "tiny")
    status = RolloutStatus(RUNNING_ROLLOUT, ("engine.max_batch_size=8",))

    def aborted() -> bool:
        for one in provider.members.values():
            one.is_open = True  # its gate has passed
        return bool(status.moves) and status.moves[0].state == "done"

    steps = provider.steps(status, [], aborted)
    with pytest.raises(Stopped, match="an operator aborted it"):
        await steps.replace_all()
    await steps.roll_back()
    assert list(provider.nodes) == ["decode-2"]


async def test_a_rollout_waits_for_all_replicas_of_a_newcomer_and_watches_them() -> None:
    provider = Versioned()
    await provider.start("decode", "tiny")
    status = RolloutStatus(RUNNING_ROLLOUT, ("engine.max_batch_size=8",), watch_s=30.0)
    states: list[str] = []

    def aborted() -> bool:
        states.append(status.moves[0].state)
        assert len(states) < 9, states
        if len(states) == 2:
            provider.join("decode-1", 1, is_open=False)
        if len(states) == 4:
            second = provider.members["decode-1.1"]
            second.record, second.healthy = replace(second.record, reasons=("its disk is slow",)), False
        return False

    provider.num_replicas = 2
    steps = provider.steps(status, [], aborted)
    with pytest.raises(Stopped, match="decode-1 is unhealthy: its disk is slow"):
        await steps.replace_all()
    assert states == ["starting", "starting", "watched", "watched"]


async def test_a_roll_back_that_is_taken_over_starts_one_node_for_each_that_has_gone() -> None:
    provider = Versioned()
    newcomers = [await provider.start("decode", "tiny") for _ in range(2)]
    moves = [
        Replacement(f"former-{number}", "decode", (f"former-{number}",), new, state="done")
        for number, new in enumerate(newcomers)
    ]
    moves.append(Replacement("former-2", "decode", tuple(newcomers)))  # its newcomer was not asked for yet
    saves = [RolloutStatus(ROLLING_BACK, ("engine.max_batch_size=8",), moves=moves).to_dict()]
    for number in range(3):
        # Each conductor ends when its provider has started a node, before it tells the next one.
        provider.told = asyncio.CancelledError("the conductor ends")
        status = RolloutStatus.from_dict(saves[-1])
        status.num_conductors = number + 1
        with suppress(asyncio.CancelledError):
            await provider.steps(status, saves).roll_back()
    assert set(provider.nodes) == {"decode-2", "decode-3"}
    assert [move["state"] for move in saves[-1]["moves"]] == ["removed"] * 3


async def test_a_newcomer_whose_start_was_not_confirmed_is_removed_by_the_roll_back() -> None:
    provider = Versioned()
    former = await provider.start("decode", "tiny")
    provider.told = ProviderFailed("a decode node was not started: no answer within 5 s")
    steps = provider.steps(RolloutStatus(RUNNING_ROLLOUT, ("engine.max_batch_size=8",)), [])
    with pytest.raises(ProviderFailed):
        await steps.replace_all()
    await steps.roll_back()
    assert list(provider.nodes) == [former]
