"""Several conductors on one Redis and the same nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.coordination import peers
from moonpool.conductor.core import Conductor
from moonpool.conductor.errors import RequestRejected
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import PlaceRequest
from moonpool.conductor.placing.node_view import Load
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Placement
from moonpool.conductor.placing.policies import POLICIES
from moonpool.kvstore.blocks.keys import chain, root_key
from moonpool.kvstore.index.redis.node_record import NodeLoad
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import ConductorOptions, IndexOptions
from tests.conductor.core_nodes import (
    LEASE_TTL_S,
    MODEL,
    PROMPT,
    Cluster,
    ScriptedNode,
    continuation,
    obedient,
    request,
    running,
)

NUM_BLOCKS = 30  # of each decode node: ten requests of 40 + 8 tokens


@asynccontextmanager
async def conductors(url: str, cluster: Cluster, count: int) -> AsyncIterator[list[Conductor]]:
    """``count`` in all, each of which knows of the nodes and of the others."""
    options = IndexOptions(redis_url=url, namespace=cluster.index.namespace, lease_ttl_s=LEASE_TTL_S)
    every = [cluster.conductor] + [Conductor(MODEL, ConductorOptions(), options) for _ in range(count - 1)]
    for conductor in every[1:]:
        await conductor.start()
    try:
        await cluster.until(lambda: all(_knows(c, len(cluster.nodes), count - 1) for c in every))
        yield every
    finally:
        for conductor in every[1:]:
            await conductor.close()


def _knows(conductor: Conductor, num_nodes: int, num_others: int) -> bool:
    facts = conductor.cluster()
    ready = [node for node in facts["nodes"] if node["state"] == "ready"]
    return len(ready) == num_nodes and facts["num_other_conductors"] == num_others


async def small(nodes: Sequence[ScriptedNode]) -> None:
    for node in nodes:
        node.load = NodeLoad(num_blocks=NUM_BLOCKS, free_blocks=NUM_BLOCKS)
        await node.announce()


async def dies(conductor: Conductor) -> None:
    """Its peers hear no more of it, and no farewell."""
    links = conductor._deps.arbitration.peers
    server, links._server = links._server, None
    assert server is not None
    for peer in links._peers.values():
        await links._end(peer)
    await server.stop(None)


async def hangs(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conductors on one busy loop wait for each other: none is left while the machine stands still."""
    monkeypatch.setattr(peers, "ANSWER_S", 30.0)
    monkeypatch.setattr(peers, "_BEAT_TIMEOUT_S", 30.0)


async def test_three_conductors_never_give_one_nodes_room_away_twice(url: str, patient: None) -> None:
    async with (
        running(url, "p0", "d0", "d1", namespace="three") as cluster,
        conductors(url, cluster, 3) as every,
    ):
        decodes = [cluster.nodes["d0"], cluster.nodes["d1"]]
        await small(decodes)
        # The prompt's blocks are on d0, so that each conductor for itself would go there first.
        root = every[0]._deps.registry.root_key("") or b""
        decodes[0].hold(chain(root, request().prompt_token_ids, MODEL.block_size))
        await decodes[0].publisher.flush()
        for conductor in every:
            members = conductor._deps.registry.members
            await cluster.until(lambda members=members: members["d0"].view.num_blocks == NUM_BLOCKS)
            await cluster.until(lambda c=conductor: c._deps.registry.mirror.num_blocks >= 2)
            for member in members.values():
                for _ in range(8):
                    member.breaker.succeeded()  # they are warm
        for node in decodes:
            node.script = hangs
        streams = [every[i % 3].generate(request(f"r{i}")) for i in range(20)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        await cluster.until(lambda: len(decodes[0].works) + len(decodes[1].works) == 20)
        assert (len(decodes[0].works), len(decodes[1].works)) == (10, 10)
        for stream in streams:
            await stream.aclose()
        # And what they held is given back.
        at_d0 = [conductor._deps.registry.members["d0"] for conductor in every]
        await cluster.until(lambda: all(member.load._foreign == Load() for member in at_d0))


async def test_a_conductor_that_dies_holds_nothing_back(url: str) -> None:
    async with (
        running(url, "p0", "d0", namespace="dies") as cluster,
        conductors(url, cluster, 2) as (survivor, victim),
    ):
        cluster.nodes["d0"].script = hangs
        stream = victim.generate(request("lost"))
        await anext(stream)
        member = survivor._deps.registry.members["d0"]
        await cluster.until(lambda: member.load._foreign is not None and member.load._foreign.num_blocks == 3)
        await dies(victim)
        await cluster.until(lambda: survivor._deps.arbitration.peers.num_live == 0)
        assert member.load._foreign is None
        cluster.nodes["d0"].script = lambda *_: asyncio.sleep(0)
        assert await cluster.generate(request("mine")) == continuation(PROMPT, 8)
        await stream.aclose()


async def uneven(cluster: Cluster, every: Sequence[Conductor]) -> None:
    """p1 takes a hundred times as long as p0, and every conductor knows."""
    slow = cluster.nodes["p1"]
    slow.profile = {name: 100 * value for name, value in slow.profile.items()}
    await slow.announce()

    def slower(conductor: Conductor) -> bool:
        costs = [conductor._deps.registry.members[name].view.cost for name in ("p0", "p1")]
        fast_s, slow_s = (cost.prefill_s(len(PROMPT), 0, time.monotonic()) for cost in costs)
        return slow_s > 2 * fast_s

    await cluster.until(lambda: all(map(slower, every)))


async def test_a_choice_stands_until_others_take_it_and_who_looks_at_no_load_is_never_moved(
    url: str, patient: None
) -> None:
    """Whatever made a policy prefer a node that is not the earliest, others have changed nothing yet."""
    async with (
        running(url, "p0", "p1", "d0", namespace="stands") as cluster,
        conductors(url, cluster, 2) as (one, other),
    ):
        await uneven(cluster, (one, other))
        arbitration, registry = one._deps.arbitration, one._deps.registry
        view = registry.view(chain(registry.root_key("") or b"", PROMPT, MODEL.block_size), set())
        wanted = PlaceRequest(len(PROMPT), remaining_tokens=8, expected_tokens=8, deadline_s=60)
        placements = []
        for turn, policy in enumerate(POLICIES.values()):
            placement = place(wanted, replace(view, turn=turn, draw=0.99), Slo(), policy)
            assert isinstance(placement, Placement)
            assert [e.node_id for e in placement.prefill_candidates] == ["p0", "p1"]
            placements.append(replace(placement, prefill=placement.prefill_candidates[1]))
        for placement in placements:
            assert await arbitration.book(placement, 3) == placement, placement.policy
        # An hour of prefill, more than any estimate of the other node.
        theirs = registry.members["p1"].load, other._deps.registry.members["p1"].load
        theirs[1].begin_prefill("long", 3600.0, 0.0)
        await cluster.until(lambda: theirs[0]._foreign is not None and theirs[0]._foreign.prefill_s > 3000)
        moved = set()
        for placement in placements:
            registry.members["p1"].view.foreign_queue_s = 0.0  # as the placement saw it
            if (await arbitration.book(placement, 3)).prefill.node_id == "p0":
                moved.add(placement.policy)
        assert moved == {"goodput", "kv-aware", "local-cache", "least-loaded"}


async def test_a_tenants_limits_and_its_share_count_over_all_conductors(url: str, patient: None) -> None:
    acme, frugal = Tenant("acme", max_requests=2), Tenant("frugal", tokens_per_minute=60)
    async with (
        running(url, "p0", "d0", namespace="tenants") as cluster,
        conductors(url, cluster, 2) as (one, other),
    ):
        cluster.nodes["d0"].script = hangs
        streams = [one.generate(request(f"r{i}", client=acme)) for i in range(2)]
        for stream in streams:
            await anext(stream)

        async def is_rejected(client: Tenant, reason: str) -> None:
            with pytest.raises(RequestRejected, match=reason):
                async with aclosing(other.generate(request("o", client=client))) as refused:
                    await anext(refused)

        admission, shares = other._deps.admission, other._deps.fair_share
        await cluster.until(lambda: admission._elsewhere.get("acme") == 2)
        await is_rejected(acme, "tenant acme has 2 requests")
        # As it was when the other one heard of them: on a busy machine the share has made up for it by now.
        assert shares.delay_s("acme", shares._accounts["acme"].seen_s) > 0
        # One that follows waits for room that another conductor makes.
        waits = asyncio.create_task(anext(other.generate(request("w", client=acme, follows=True))))
        await cluster.until(lambda: admission._waiting)
        await streams[0].aclose()
        assert (await waits).index == 0
        await streams[1].aclose()

        cluster.nodes["d0"].script = obedient
        for i in range(2):  # 40 and 8 tokens each
            _ = [event async for event in one.generate(request(f"f{i}", client=frugal))]
        await cluster.until(lambda: frugal.name in admission._buckets)
        await cluster.until(lambda: admission._buckets[frugal.name].wait_s(other._deps.clock()) > 0)
        await is_rejected(frugal, "60 tokens a minute")
        # The limits are not left with a conductor that is gone.
        await one.close()
        await cluster.until(lambda: not admission._elsewhere.get("acme"))


async def test_a_tenants_root_is_equal_at_all_conductors_and_cannot_be_computed_from_its_name(
    url: str,
) -> None:
    async with (
        running(url, "p0", "d0", namespace="roots") as cluster,
        conductors(url, cluster, 2) as every,
    ):
        registries = [conductor._deps.registry for conductor in every]
        layout, identity = registries[0].layout, registries[0]._identity
        assert layout is not None and identity is not None
        first, second = (registry.root_key("acme") for registry in registries)
        assert first == second
        model = identity[0].encode()
        assert first != root_key(model=model, layout=layout, tenant=b"acme")
        assert registries[0].root_key("") == root_key(model=model, layout=layout)
