"""Hot prefixes: their counts, copies and releases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.replication.copy_plan import (
    Budget,
    Copy,
    Holders,
    Shape,
    add_copy,
    copies_wanted,
    plan_release,
    plan_replication,
    plan_store_copies,
)
from moonpool.conductor.replication.heat import Heat
from moonpool.conductor.replication.prefix_tree import prefix_tree, told
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from tests.conductor.views import PROFILE, node

SHAPE = Shape(block_size=16, block_nbytes=65536)
HOT = [b"hot-%012d" % i for i in range(10)]


def held(**lengths: int) -> Holders:
    def holders(keys: Sequence[bytes]) -> Mapping[str, int]:
        return {node_id: length for node_id, length in lengths.items() if list(keys[:1]) == HOT[:1]}

    return holders


def in_demand(nodes_worth: float, heat: Heat | None = None) -> Heat:
    """Ten requests a second for five half-lives, which keep about so many nodes busy."""
    heat = heat or Heat(half_life_s=10.0)
    for i in range(500):
        heat.touch(HOT, i / 10 - 50, compute_s=nodes_worth / 10)
    return heat


def plan(heat: Heat, holders: Holders, fleet: NodeTable, budget_nbytes: float = 1e9) -> list[Copy]:
    links = LinkModel(connect_s=0.0)
    return plan_replication(heat, holders, fleet, links, SHAPE, budget_nbytes=budget_nbytes, now_s=0.0)


def test_heat_is_the_rate_of_late_and_fades() -> None:
    heat = in_demand(1.5)
    (chain,) = heat.hottest(5, 0.0)
    assert chain.keys == tuple(HOT)
    assert heat.uses_per_s(chain, 0.0) == pytest.approx(10, rel=0.05)
    assert heat.nodes_worth(chain, 0.0) == pytest.approx(1.5, rel=0.05)
    assert heat.uses_per_s(chain, 30.0) == pytest.approx(10 / 8, rel=0.05)
    assert heat.of(HOT[-1]) is chain
    assert heat.of(HOT[0]) is None


def chain_of(name: str) -> list[BlockKey]:
    """Keys of a prompt of one letter a block: chained, as those of blocks are."""
    return [BlockKey(name[: i + 1].encode()) for i in range(len(name))]


def test_hot_prefixes_are_a_tree_with_their_counts() -> None:
    heat = Heat(half_life_s=10.0)
    for name in ("system", "systole", "sys", "other"):
        heat.touch(chain_of(name), 0.0)
    heat.touch(chain_of("other"), 0.0)
    heat.count(chain_of("systemic"), 6, "a")  # has all of system, and sys
    heat.count(chain_of("systole"), 4, "a")  # computes its end
    heat.count(chain_of("nothing"), 0, "b")
    copies = {"p0": Tier.POOL, "p1": Tier.SSD}
    root = prefix_tree(heat.hottest(9, 0.0))
    tree = told(
        root,
        lambda chain: chain.heat,
        lambda keys: copies,
        lambda key: Counter(copies.values()),
    )
    shown = [
        (bytes.fromhex(one["key"]).decode(), one["depth"], one["hits"], one["misses"], one["tenant"])
        for one in tree
    ]
    assert shown == [
        ("sys", 0, 2, 0, "a"),
        ("syst", 1, 1, 1, "a"),  # where the two part
        ("system", 2, 1, 0, "a"),
        ("systole", 2, 0, 1, "a"),
        ("other", 0, 0, 0, ""),
    ]
    assert [one["uses_per_s"] for one in tree] == [3, 2, 1, 1, 2]
    assert all((one["copies"], one["holders"]) == (2, ["p0", "p1"]) for one in tree)
    assert all(one["tiers"] == {"pool": 1, "ssd": 1} for one in tree)


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=30, unique=True))
def test_a_tree_has_every_prefix_once_below_what_it_begins_with(names: list[str]) -> None:
    heat = Heat(half_life_s=10.0)
    for name in names:
        heat.touch(chain_of(name), 0.0)
    root = prefix_tree(heat.hottest(len(names), 0.0))
    tree = told(root, lambda chain: chain.heat, lambda keys: {}, lambda key: {})
    shown = [bytes.fromhex(one["key"]).decode() for one in tree]
    assert set(names) <= set(shown) and len(set(shown)) == len(shown) < 2 * len(names)
    above: list[str] = []
    for name, one in zip(shown, tree, strict=True):
        del above[one["depth"] :]
        assert name.startswith(above[-1] if above else "") and one["blocks"] == len(name)
        above.append(name)


@given(st.lists(st.integers(0, 40), max_size=300))
def test_heat_keeps_the_hottest_in_bounded_memory(uses: list[int]) -> None:
    heat, now_s = Heat(half_life_s=1e9, capacity=16), 0.0
    for use in uses:
        heat.touch([b"%d" % use], now_s)
        heat.touch([b"always"], now_s)
        assert len(heat) <= 16
    if uses:
        always = heat.of(b"always")
        assert always is not None
        assert always.heat == heat.hottest(1, now_s)[0].heat == pytest.approx(len(uses))


def test_what_comes_up_fast_is_seen_at_once() -> None:
    heat = Heat(half_life_s=30.0)
    for i in range(60):
        heat.touch(HOT, i / 10, compute_s=0.2)
    (chain,) = heat.hottest(1, 6.0)
    assert heat.uses_per_s(chain, 6.0) == pytest.approx(10, rel=0.1)
    assert copies_wanted(heat, chain, 6.0) == 4


def test_a_prefix_in_demand_is_copied_to_idle_nodes_before_its_holder_is_full() -> None:
    fleet = NodeTable([node("p0"), node("p1", queue_s=5.0), node("p2"), node("p3")])
    copies = plan(in_demand(0.9), held(p0=10), fleet)
    assert [(c.source, c.target, c.num_blocks, c.nbytes) for c in copies] == [("p0", "p2", 10, 655360)]
    assert plan(in_demand(0.4), held(p0=10), fleet) == []
    assert [c.target for c in plan(in_demand(9.0), held(p0=10), fleet)] == ["p2", "p3", "p1"]


def test_who_has_a_part_of_it_gets_the_rest_and_any_role_can_be_the_source() -> None:
    fleet = NodeTable([node("p0", queue_s=9.0), node("p1")])
    (copy,) = plan(in_demand(0.4), held(d0=10, p0=7), fleet)
    assert (copy.source, copy.target, copy.num_blocks) == ("d0", "p0", 3)


def test_the_bandwidth_is_kept_and_what_is_faster_computed_is_not_copied() -> None:
    fleet = NodeTable([node(f"p{i}") for i in range(8)])
    heat = in_demand(9.0)
    copies = plan(heat, held(p0=10), fleet, budget_nbytes=2.5 * 655360)
    assert [(c.num_blocks, len(c.keys)) for c in copies] == [(10, 10), (10, 10), (5, 5)], (
        "the rest comes later"
    )
    assert plan(heat, held(p0=10), fleet, budget_nbytes=65535) == []
    slow = LinkModel(latency_s=10.0)
    assert plan_replication(heat, held(p0=10), fleet, slow, SHAPE, budget_nbytes=1e9, now_s=0.0) == []


def test_unwanted_copies_are_released_and_one_always_stays() -> None:
    fleet = NodeTable([node(f"p{i}") for i in range(4)])
    heat = in_demand(1.4)
    made = plan(heat, held(p0=10), fleet)
    assert [c.target for c in made] == ["p1", "p2"]
    everywhere = held(p0=10, p1=10, p2=10)
    assert plan_release(heat, made, everywhere, fleet, now_s=0.0) == []
    # At half the demand they would still be wanted at twice of it.
    assert plan_release(heat, made, everywhere, fleet, now_s=9.0) == []
    assert len(plan_release(heat, made, everywhere, fleet, now_s=20.0)) == 1
    assert plan_release(heat, made, everywhere, fleet, now_s=1000.0) == made
    assert len(plan_release(heat, made, held(p1=10, p2=10), fleet, now_s=1000.0)) == 1
    # One that a node has evicted by itself is forgotten.
    assert plan_release(heat, made, held(p0=10, p2=10), fleet, now_s=0.0) == made[:1]


class Nodes:
    """What nodes hold, as copies change it."""

    def __init__(self, **chains: Sequence[bytes]) -> None:
        self.keys = {node_id: list(keys) for node_id, keys in chains.items()}

    def holders(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        lengths = {node_id: shared(held, keys) for node_id, held in self.keys.items()}
        return {node_id: length for node_id, length in lengths.items() if length}

    def copy(self, copy: Copy) -> None:
        held = self.keys.setdefault(copy.target, [])
        assert shared(self.keys[copy.source], copy.keys) == len(copy.keys)
        assert len(copy.keys) - copy.num_blocks <= shared(held, copy.keys), "in order"
        held += [key for key in copy.keys if key not in held]


def shared(held: Sequence[bytes], keys: Sequence[bytes]) -> int:
    return next((i for i, key in enumerate(keys) if key not in held), len(keys))


def test_a_long_chain_of_a_large_model_is_copied_over_several_rounds() -> None:
    """8,192 tokens of Llama 3 70B: ten times what one second may copy."""
    shape = Shape(block_size=16, block_nbytes=80 * 2 * 8 * 128 * 2 * 16)
    long = [b"long%012d" % i for i in range(512)]
    heat, nodes, made = Heat(half_life_s=1e9), Nodes(p0=long), list[Copy]()
    for i in range(100):
        heat.touch(long, i / 10, compute_s=0.3)
    slow = NodeTable([node(name) for name in ("p0", "p1")])
    for view in slow:
        view.cost.profile = replace(PROFILE, prefill_token_s=1e-3)
    budget = Budget(256 << 20)
    for second in range(12):
        now_s = 10.0 + second
        assert plan_release(heat, made, nodes.holders, slow, now_s=now_s) == [], "not while it is copied"
        left_nbytes = budget.nbytes(1.0, shape.block_nbytes)
        copies = plan_replication(
            heat, nodes.holders, slow, LinkModel(), shape, budget_nbytes=left_nbytes, now_s=now_s
        )
        assert sum(copy.nbytes for copy in copies) <= left_nbytes
        budget.spend(sum(copy.nbytes for copy in copies))
        for copy in copies:
            nodes.copy(copy)
            add_copy(made, copy)
    assert nodes.keys["p1"] == long
    assert [(copy.keys, copy.num_blocks) for copy in made] == [(tuple(long), 512)], "one copy, in the end"
    assert plan_release(heat, made, nodes.holders, slow, now_s=1e11) == made


def test_blocks_larger_than_a_second_of_bandwidth_are_saved_up_for() -> None:
    budget, seen = Budget(100.0), []
    for _ in range(6):
        nbytes = budget.nbytes(1.0, 250)
        seen.append(nbytes // 250)
        budget.spend(nbytes // 250 * 250)
    assert seen == [0, 0, 1, 0, 1, 0]


def test_the_longest_shared_part_comes_first_and_is_copied_once() -> None:
    """Two of three chains share eight blocks: those are read once, and before the hotter third chain."""
    prompt = [b"sys-%012d" % i for i in range(8)]
    chains = [prompt + [b"tail%012d" % (10 * n + i) for i in range(2)] for n in range(2)]
    heat = Heat(half_life_s=10.0)
    for i in range(500):
        for keys in (*chains, HOT, HOT):
            heat.touch(keys, i / 10 - 50, compute_s=0.08)
    nodes, fleet = Nodes(p0=[*chains[0], *chains[1], *HOT]), NodeTable([node("p0"), node("p1")])
    copies = plan(heat, nodes.holders, fleet, budget_nbytes=15 * 65536)
    assert {copy.target for copy in copies} == {"p1"}
    assert sorted(copy.num_blocks for copy in copies) == [2, 3, 10]
    assert [copy.chain in (chains[0][-1], chains[1][-1]) for copy in copies] == [True, True, False]
    for copy in copies:
        nodes.copy(copy)
    assert nodes.holders(chains[0])["p1"] == nodes.holders(chains[1])["p1"] == 10


@given(seed=st.integers(0, 10_000), worth=st.floats(0.1, 20), budget=st.floats(0, 5e6))
def test_a_plan_makes_no_copy_twice_and_none_that_is_there(seed: int, worth: float, budget: float) -> None:
    rng = Random(seed)
    nodes = [node(f"p{i}", queue_s=rng.random()) for i in range(rng.randrange(1, 40))]
    holders = held(**{n.node_id: rng.randrange(1, 11) for n in rng.sample(nodes, rng.randrange(len(nodes)))})
    heat, fleet = in_demand(worth), NodeTable(nodes)
    copies = plan(heat, holders, fleet, budget)
    assert copies == plan(heat, holders, fleet, budget)
    rng.shuffle(nodes)
    assert copies == plan(heat, holders, NodeTable(nodes), budget)
    assert sum(c.nbytes for c in copies) <= budget
    targets = [c.target for c in copies]
    assert len(targets) == len(set(targets))
    for copy in copies:
        lengths = holders(copy.keys)
        assert lengths[copy.source] == len(HOT)
        assert lengths.get(copy.target, 0) == len(copy.keys) - copy.num_blocks
        assert list(copy.keys) == HOT[: len(copy.keys)] and copy.chain == HOT[-1]
        assert copy.num_blocks > 0
    full = sum(length == len(HOT) for length in holders(HOT).values())
    assert full + len(copies) <= max(full, copies_wanted(heat, heat.hottest(1, 0.0)[0], 0.0))


def lend(heat: Heat, holders: Holders, *stores: str, budget_nbytes: float = 1e9) -> list[Copy]:
    return plan_store_copies(heat, holders, stores, SHAPE, budget_nbytes=budget_nbytes, now_s=0.0)


def test_what_is_used_again_is_lent_to_one_store_node_whoever_plans_it() -> None:
    heat = in_demand(0.01)  # so little work that no prefill node needs a copy
    (copy,) = lend(heat, held(p0=10), "s0", "s1")
    assert (copy.source, copy.num_blocks, copy.nbytes) == ("p0", 10, 655360)
    assert lend(heat, held(p0=10), "s1", "s0") == [copy]
    assert lend(heat, held(**{"p0": 10, copy.target: 10}), "s0", "s1") == []
    (rest,) = lend(heat, held(**{"p0": 10, copy.target: 4}), "s0", "s1")
    assert (rest.target, rest.num_blocks) == (copy.target, 6)


def test_nothing_is_lent_that_was_used_once_or_costs_too_much_or_has_no_place() -> None:
    once = Heat(half_life_s=10.0)
    once.touch(HOT, -1.0)
    assert lend(once, held(p0=10), "s0") == []
    once.touch(HOT, 0.0)
    assert len(lend(once, held(p0=10), "s0")) == 1
    (part,) = lend(once, held(p0=10), "s0", budget_nbytes=655359)
    assert (part.num_blocks, len(part.keys)) == (9, 9)
    assert lend(once, held(p0=10), "s0", budget_nbytes=65535) == []
    assert lend(once, held(p0=10)) == []
    assert lend(once, held(p0=9), "s0") == [], "no node has all of it"
