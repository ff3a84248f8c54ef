"""Large clusters: a first look over arrays must not change what a look at every node would choose."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView
from moonpool.conductor.placing.estimates import estimate_prefill, sources, usable_blocks
from moonpool.conductor.placing.node_table import SMALL, NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Placement, Rejection
from moonpool.conductor.placing.policies import POLICIES
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.block_map import BlockMap
from tests.conductor.views import REQUEST, cluster, node, placed


def crowd(seed: int, count: int) -> ClusterView:
    rng = Random(seed)
    prefill = [
        node(f"p{i}", queue_s=rng.choice([0.0, rng.random()]), num_placed=rng.randrange(3))
        for i in range(count)
    ]
    for late in rng.sample(prefill, count // 3):
        if not len(late.queue):  # it should have ended some time ago
            late.queue.add("late", order_s=-2.0, compute_s=1.0, now_s=-1.0 - rng.random())
    decode = [
        node(f"d{i}", num_running=rng.randrange(20), num_context_tokens=rng.randrange(20_000))
        for i in range(count)
    ]
    holders = rng.sample([*prefill, *decode], rng.randrange(2 * count))
    return cluster(prefill, decode, {holder.node_id: rng.randrange(1, 62) for holder in holders})


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10_000), count=st.integers(SMALL + 1, 120), policy=st.sampled_from(sorted(POLICIES))
)
def test_the_first_look_keeps_the_best(seed: int, count: int, policy: str) -> None:
    view = crowd(seed, count)
    placement = placed(REQUEST, view, policy)
    assert placement == placed(REQUEST, view, policy)
    if policy in ("goodput", "kv-aware", "local-cache"):
        rule, usable = POLICIES[policy], usable_blocks(REQUEST, view)
        fetchable = sources(view, usable) if rule.fetches else ()
        every = [estimate_prefill(REQUEST, view, rule, n, usable, fetchable, Slo()) for n in view.prefill]
        slack = 1.05 if policy == "goodput" else 1.0
        assert placement.prefill.ttft_s <= slack * min(e.ttft_s for e in every) + 1e-4
    if policy == "least-loaded":
        assert placement.prefill.queue_s == min(n.queue.wait_s(0.0) for n in view.prefill)


def test_the_first_look_leaves_nodes_that_stand_still() -> None:
    still = [node(f"s{i}") for i in range(60)]
    for late in still:
        late.queue.add("late", order_s=-9.0, compute_s=1.0, now_s=-6.0)
    view = cluster([*still, *(node(f"p{i}", queue_s=0.5) for i in range(40))], [node("d0")])
    assert placed(REQUEST, view).prefill.queue_s == 0.5


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), policy=st.sampled_from(["goodput", "kv-aware", "local-cache"]))
def test_the_order_of_many_nodes_changes_nothing(seed: int, policy: str) -> None:
    view = crowd(seed, 60)
    prefill, decode = list(view.prefill), list(view.decode)
    Random(seed + 1).shuffle(prefill)
    Random(seed + 2).shuffle(decode)
    other = placed(REQUEST, replace(view, prefill=NodeTable(prefill), decode=NodeTable(decode)), policy)
    first = placed(REQUEST, view, policy)
    assert (first.prefill, first.decode) == (other.prefill, other.decode)


@given(
    seed=st.integers(0, 10_000),
    changes=st.lists(st.tuples(st.sampled_from("arc"), st.integers(0, 59)), max_size=80),
)
def test_arrays_follow_nodes_that_come_change_and_go(seed: int, changes: list[tuple[str, int]]) -> None:
    nodes = [node(f"p{i}") for i in range(60)]
    fleet, inside = NodeTable(nodes[:40]), set(nodes[:40])
    fleet.table(0.0)
    for i, (change, which) in enumerate(changes):
        chosen = nodes[which]
        if change == "r" and chosen in inside:
            fleet.remove(chosen)
            inside.discard(chosen)
        elif change == "a" and chosen not in inside:
            fleet.add(chosen)
            inside.add(chosen)
        elif change == "c":
            chosen.num_running = i
            fleet.touch(chosen)
        if i % 7 == 0:
            fleet.table(0.0)
    assert set(fleet) == inside
    table, fresh = fleet.table(0.0), NodeTable(list(fleet)).table(0.0)
    assert (table == fresh).all()
    assert all(fleet.get(n.node_id) is n for n in inside)


def test_masks_of_the_mirror_say_the_same_as_names() -> None:
    rng, blocks = Random(3), BlockMap()
    keys = [rng.randbytes(16) for _ in range(80)]
    view = crowd(3, 100)
    everyone: list[NodeView] = [*view.prefill, *view.decode]
    for member in everyone:
        blocks.join(member.node_id)
        member.slot = blocks.slot_of(member.node_id)
        if length := rng.choice([0, 5, rng.randrange(80)]):
            blocks.store(member.node_id, b"".join(keys[:length]), rng.choice(list(Tier)))
    named, masked = blocks.longest_prefix(keys), blocks.prefix_map(keys)
    assert dict(masked) == named
    assert len(masked) == len(named)
    assert [masked.get(n.node_id) for n in everyone] == [named.get(n.node_id) for n in everyone]
    view.prefill.table(0.0)
    assert masked.spread(view.prefill.slots()).tolist() == [named.get(n.node_id, 0) for n in view.prefill]
    assert sorted(masked.longest(9).values()) == sorted(named.values())[-9:]
    without = blocks.prefix_map(keys, ~blocks.flag_of("p0"))
    assert set(without) == set(named) - {"p0"}
    slow = blocks.slow_blocks(keys, named)
    for node_id, length in named.items():
        assert (
            slow.get(node_id, (0, 0))
            == {
                Tier.POOL: (0, 0),
                Tier.HOST: (length, 0),
                Tier.SSD: (0, length),
            }[blocks.tier_of(node_id, keys[0]) or Tier.POOL]
        )
    by_name = placed(REQUEST, replace(view, prefix_blocks=named, slow_blocks=slow))
    by_mask = placed(REQUEST, replace(view, prefix_blocks=masked, slow_blocks=slow))
    assert (by_name.prefill.ttft_s, by_name.decode) == (pytest.approx(by_mask.prefill.ttft_s), by_mask.decode)


def test_in_a_crowd_too_pools_must_be_large_enough_and_failures_are_avoided() -> None:
    view = crowd(5, 50)
    for i, member in enumerate(view.prefill):
        member.num_blocks = 100 if i < 10 else 10
    allowed = {member.node_id for member in list(view.prefill)[:10]}
    view = replace(view, prefill=NodeTable(view.prefill))
    assert placed(REQUEST, view).prefill.node_id in allowed
    avoid = allowed - {"p3"}
    assert placed(REQUEST, replace(view, avoid=avoid)).prefill.node_id == "p3"
    assert placed(REQUEST, replace(view, avoid=allowed)).prefill.node_id in allowed
    for member in view.prefill:
        member.num_blocks = 10
    outcome = place(REQUEST, replace(view, prefill=NodeTable(view.prefill)), Slo())
    assert isinstance(outcome, Rejection)
    assert outcome.capacity_tokens == 159


def test_blind_policies_go_round_a_crowd() -> None:
    view = crowd(1, 50)
    chosen = [placed(REQUEST, replace(view, turn=turn), "round-robin").prefill.node_id for turn in range(100)]
    assert chosen[:50] == chosen[50:] == [member.node_id for member in view.prefill]
    outcome = place(replace(REQUEST, deadline_s=0.5), view, Slo(), POLICIES["random"])
    assert isinstance(outcome, Placement)


@pytest.mark.parametrize("num_others", [1, SMALL])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_answer_is_decoded_where_its_pool_does_not_cut_it_short(policy: str, num_others: int) -> None:
    # 1,000 tokens of prompt and 100 more take 69 blocks of 16; the small pools take the prompt alone.
    small = [node(f"small-{number}", num_blocks=65) for number in range(num_others)]
    large = node("large", num_blocks=69, num_running=20, num_context_tokens=20_000)
    view = cluster([node("p0")], [*small, large])
    assert placed(REQUEST, view, policy).decode.node_id == "large"
    # Where no pool has room for all, the most room.
    large.num_blocks = 68
    view = cluster([node("p0")], [*small, large])
    assert placed(REQUEST, view, policy).decode.node_id == "large"
    # A short answer goes to the idle node.
    if policy in ("goodput", "kv-aware", "local-cache", "least-loaded"):
        short = replace(REQUEST, remaining_tokens=8, expected_tokens=8)
        assert placed(short, view, policy).decode.node_id.startswith("small-")
