"""Copies of hot prefixes, live: the conductor asks nodes for them, and to let them go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moonpool.conductor.core import Conductor
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.replication.copier import Replicator
from moonpool.kvstore.blocks.keys import chain
from tests.conductor.core_nodes import (
    MODEL,
    PROMPT,
    RedisProcess,
    ScriptedNode,
    request,
    running,
)


def replicator_of(conductor: Conductor, clock_s: list[float], nbytes_per_s: float = 1e9) -> Replicator:
    """The conductor's own, by another clock and not running by itself."""
    deps = conductor._deps
    return Replicator(
        deps.registry,
        deps.cost_model,
        nbytes_per_s=nbytes_per_s,
        block_size=MODEL.block_size,
        clock=lambda: clock_s[0],
    )


async def test_a_hot_prefix_is_copied_and_released_when_it_has_cooled(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "p1", "p2", "d0", replicate_nbytes_per_s=0) as cluster:
        clock_s = [0.0]
        replicator = replicator_of(cluster.conductor, clock_s)
        registry = cluster.conductor._deps.registry
        root_key = registry.root_key("")
        assert root_key is not None
        keys = chain(root_key, list(range(3200)), MODEL.block_size)
        cluster.nodes["p0"].hold(keys)
        await cluster.until(lambda: registry.holders(keys).get("p0") == len(keys))
        for node in cluster.nodes.values():  # so slow that copying pays
            node.profile = {"prefill_token_s": 1.0, "decode_base_s": 1e-3}
            await node.announce()
        await cluster.until(
            lambda: all(v.cost.profile.prefill_token_s == 1.0 for v in registry.fleet("prefill"))
        )

        for i in range(100):
            clock_s[0] = i / 10
            replicator.note(keys, registry.holders(keys), compute_s=0.12)
        await replicator.round()
        assert sorted(cluster.nodes[name].copied for name in ("p0", "p1", "p2")) == [
            [],
            [("p0", len(keys))],
            [("p0", len(keys))],
        ]
        await cluster.until(lambda: len(registry.holders(keys)) == 3)
        await replicator.round()  # nothing is asked for twice
        assert sum(len(node.copied) for node in cluster.nodes.values()) == 2

        released = core_metrics.hot_released_blocks._value.get()
        clock_s[0] += 600.0
        await replicator.round()
        await cluster.until(lambda: list(registry.holders(keys)) == ["p0"])
        assert core_metrics.hot_released_blocks._value.get() == released + 2 * len(keys)


async def test_a_chain_beyond_one_rounds_bandwidth_is_copied_in_several_and_released_whole(
    redis: RedisProcess,
) -> None:
    async with running(redis.url, "p0", "p1", "d0", namespace="rounds", replicate_nbytes_per_s=0) as cluster:
        clock_s, registry = [0.0], cluster.conductor._deps.registry
        layout, root_key = registry.layout, registry.root_key("")
        assert layout is not None and root_key is not None
        replicator = replicator_of(cluster.conductor, clock_s, nbytes_per_s=80 * layout.block_nbytes)
        keys = chain(root_key, list(range(3200)), MODEL.block_size)
        cluster.nodes["p0"].hold(keys)
        for node in cluster.nodes.values():  # so slow that copying pays
            node.profile = {"prefill_token_s": 1.0, "decode_base_s": 1e-3}
            await node.announce()
        await cluster.until(lambda: registry.holders(keys).get("p0") == len(keys))
        await cluster.until(
            lambda: all(v.cost.profile.prefill_token_s == 1.0 for v in registry.fleet("prefill"))
        )
        for i in range(100):
            clock_s[0] = i / 10
            replicator.note(keys, registry.holders(keys), compute_s=0.12)
        for num_held in (80, 160, 200, 200):
            await replicator.round()
            await cluster.until(lambda n=num_held: registry.holders(keys).get("p1") == n)
        assert cluster.nodes["p1"].copied == [("p0", 80), ("p0", 80), ("p0", 40)]
        clock_s[0] += 600.0
        await replicator.round()
        await cluster.until(lambda: list(registry.holders(keys)) == ["p0"])


async def test_what_is_used_again_is_lent_to_a_store_node_and_left_there(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", "s0", namespace="lent", replicate_nbytes_per_s=0) as cluster:
        clock_s = [0.0]
        replicator = replicator_of(cluster.conductor, clock_s)
        registry = cluster.conductor._deps.registry
        root_key = registry.root_key("")
        assert root_key is not None
        keys = chain(root_key, list(range(160)), MODEL.block_size)
        cluster.nodes["p0"].hold(keys)
        await cluster.until(lambda: registry.holders(keys).get("p0") == len(keys))
        replicator.note(keys, registry.holders(keys), compute_s=0.01)
        await replicator.round()
        assert cluster.nodes["s0"].copied == []
        replicator.note(keys, registry.holders(keys), compute_s=0.01)
        await replicator.round()
        assert cluster.nodes["s0"].copied == [("p0", len(keys))]
        await cluster.until(lambda: registry.holders(keys).get("s0") == len(keys))
        clock_s[0] += 600.0
        await replicator.round()
        assert registry.holders(keys).get("s0") == len(keys)


async def test_a_target_that_dies_costs_nothing_but_the_copy(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "p1", "d0", namespace="dies", replicate_nbytes_per_s=0) as cluster:
        replicator = replicator_of(cluster.conductor, [0.0])
        registry = cluster.conductor._deps.registry
        root_key = registry.root_key("")
        assert root_key is not None
        keys = chain(root_key, list(range(3200)), MODEL.block_size)
        cluster.nodes["p0"].hold(keys)
        await cluster.until(lambda: registry.holders(keys).get("p0") == len(keys))
        for _ in range(100):
            replicator.note(keys, registry.holders(keys), compute_s=10.0)
        await cluster.nodes["p1"].stop_serving()
        await replicator.round()
        assert await cluster.generate(request(prompt=PROMPT))


async def test_it_runs_by_itself_and_ends_with_the_conductor(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", namespace="runs") as cluster:
        replicator = cluster.conductor._deps.replicator
        await cluster.generate(request("first"))
        assert replicator._task is not None and not replicator._task.done()
    assert replicator._task.done()


async def test_a_node_that_is_to_end_hands_on_what_it_alone_has(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "p1", "d0", replicate_nbytes_per_s=0) as cluster:
        clock_s = [0.0]
        replicator, registry = replicator_of(cluster.conductor, clock_s), cluster.conductor._deps.registry
        root_key = registry.root_key("")
        assert root_key is not None
        alone, common, once = (
            chain(root_key, [first, *range(1, 640)], MODEL.block_size) for first in (7, 8, 9)
        )
        for keys in (alone, common, once):
            cluster.nodes["p0"].hold(keys)
        cluster.nodes["p1"].hold(common)
        await cluster.until(lambda: all(registry.holders(keys) for keys in (alone, once)))
        await cluster.until(lambda: len(registry.holders(common)) == 2)
        for keys in (alone, alone, common, common, once):
            replicator.note(keys, registry.holders(keys), compute_s=0.1)
        lost = core_metrics.hot_lost_blocks._value.get()
        await replicator.hand_on("p0")
        assert cluster.nodes["p1"].copied == [("p0", len(alone))]  # not what it has, nor what was used once
        assert core_metrics.hot_lost_blocks._value.get() == lost
        await cluster.until(lambda: len(registry.holders(alone)) == 2)
        await replicator.hand_on("p0")
        assert len(cluster.nodes["p1"].copied) == 1


@pytest.mark.parametrize("others", [(), ("p1",)], ids=["nobody is there", "no bandwidth"])
async def test_what_cannot_be_handed_on_is_counted(redis: RedisProcess, others: tuple[str, ...]) -> None:
    async with running(redis.url, "p0", *others, "d0", replicate_nbytes_per_s=0) as cluster:
        replicator, registry = cluster.conductor._deps.replicator, cluster.conductor._deps.registry
        root_key = registry.root_key("")
        assert root_key is not None
        keys = chain(root_key, list(range(640)), MODEL.block_size)
        cluster.nodes["p0"].hold(keys)
        await cluster.until(lambda: registry.holders(keys))
        for _ in range(2):
            replicator.note(keys, registry.holders(keys), compute_s=0.1)
        lost = core_metrics.hot_lost_blocks._value.get()
        await replicator.hand_on("p0")
        assert all(cluster.nodes[name].copied == [] for name in others)
        assert core_metrics.hot_lost_blocks._value.get() == lost + len(keys)


async def test_a_node_that_joins_gets_hot_prefixes_before_requests(
    redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on, replicate = asyncio.Event(), asyncio.Event(), ScriptedNode.Replicate

    async def slow(self: ScriptedNode, *call: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await replicate(self, *call)

    monkeypatch.setattr(ScriptedNode, "Replicate", slow)
    monkeypatch.setattr("moonpool.conductor.replication.copier._WARM_S", 60.0)
    async with (
        asyncio.timeout(60),
        running(redis.url, "p0", "d0", namespace="warm", replicate_nbytes_per_s=1 << 30) as cluster,
    ):
        deps = cluster.conductor._deps
        registry, replicator = deps.registry, deps.replicator
        root_key = registry.root_key("")
        assert root_key is not None
        often, more, once = (
            chain(root_key, [first, *range(1, 640)], MODEL.block_size) for first in (7, 8, 9)
        )
        for keys in (often, more, once):
            cluster.nodes["p0"].hold(keys)
        await cluster.until(lambda: all(registry.holders(keys) for keys in (often, more, once)))
        for keys in (often, often, more, more, more, once):
            replicator.note(keys, registry.holders(keys), compute_s=1e-6)
        warmed = core_metrics.warmed_blocks._value.get()
        await cluster.add("p1")
        await asked.wait()
        assert [view.node_id for view in registry.fleet("prefill")] == ["p0"]
        go_on.set()
        await cluster.until(lambda: len(registry.fleet("prefill")) == 2)
        # The hottest first; what was used once is not copied.
        assert cluster.nodes["p1"].copied == [("p0", len(more)), ("p0", len(often))]
        assert core_metrics.warmed_blocks._value.get() == warmed + len(more) + len(often)
