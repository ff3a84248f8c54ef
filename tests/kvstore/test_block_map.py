"""Laws of the map from blocks to nodes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.block_map import BlockMap

NODES = st.sampled_from(["a", "b", "c", "d"])
KEYS = st.lists(st.integers(0, 30), max_size=12, unique=True)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def packed(numbers: list[int]) -> bytes:
    return b"".join(map(key, numbers))


def chain_map(lengths: dict[str, int]) -> BlockMap:
    blocks = BlockMap()
    for node_id, length in lengths.items():
        blocks.join(node_id)
        blocks.store(node_id, packed(list(range(length))), Tier.POOL)
    return blocks


@given(st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.integers(0, 40)), st.integers(0, 50))
def test_the_longest_prefix_is_found_on_every_node(lengths: dict[str, int], asked: int) -> None:
    found = chain_map(lengths).longest_prefix([key(number) for number in range(asked)])
    assert found == {node: min(length, asked) for node, length in lengths.items() if length and asked}


def test_a_thousand_nodes_have_a_bit_each() -> None:
    lengths = {f"node-{number}": number % 97 + 1 for number in range(1100)}
    blocks = chain_map(lengths)
    assert blocks.longest_prefix([key(number) for number in range(128)]) == lengths
    blocks.check_integrity()


def test_a_node_that_left_is_gone_before_it_is_swept_and_its_bit_is_not_used_until_then() -> None:
    blocks = chain_map({"a": 5000, "b": 10})
    chain = [key(number) for number in range(5000)]
    blocks.leave("a")
    assert blocks.longest_prefix(chain) == {"b": 10}
    blocks.join("c")
    assert blocks.longest_prefix(chain) == {"b": 10}
    assert blocks.sweep(100)
    blocks.join("d")
    assert blocks.longest_prefix(chain) == {"b": 10}
    while blocks.sweep(100):
        pass
    blocks.check_integrity()
    assert blocks.num_blocks == 10
    blocks.join("e")
    assert blocks.longest_prefix(chain) == {"b": 10}
    blocks.store("e", packed([0, 1]), Tier.HOST)
    assert blocks.longest_prefix(chain) == {"b": 10, "e": 2}
    assert [blocks.tier_of("e", chain[0]), blocks.tier_of("b", chain[0])] == [Tier.HOST, Tier.POOL]
    assert [blocks.tier_of("e", chain[2]), blocks.tier_of("a", chain[0])] == [None, None]
    blocks.check_integrity()


def test_what_is_said_anew_replaces_what_was_known_without_a_moment_of_nothing() -> None:
    blocks = chain_map({"a": 8})
    chain = [key(number) for number in range(8)]
    blocks.begin("a")
    blocks.store("a", packed([0, 1, 2]), Tier.POOL)
    assert blocks.longest_prefix(chain) == {"a": 8}
    blocks.complete("a")
    blocks.store("a", packed([3]), Tier.POOL)
    while blocks.sweep(1):
        pass
    assert blocks.longest_prefix(chain) == {"a": 4}
    blocks.check_integrity()


def test_a_node_that_changes_its_blocks_for_ever_keeps_a_bounded_reverse_index() -> None:
    blocks = chain_map({"a": 10})
    for turn in range(3000):
        blocks.store("a", packed(list(range(100 + turn % 7, 110 + turn % 7))), Tier.POOL)
        blocks.remove("a", packed(list(range(100, 120))))
    slot = blocks._by_node["a"]
    assert sum(map(len, slot.runs)) // 16 <= 2 * 10 + 4096 + 10
    blocks.check_integrity()


class MapAgainstSets(RuleBasedStateMachine):
    """Any history of joins, changes, renewals, departures and sweeps leaves what plain sets would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockMap()
        self.held: dict[str, dict[int, Tier]] = {}
        self.renewing: dict[str, set[int]] = {}

    @rule(node=NODES)
    def join(self, node: str) -> None:
        self.blocks.join(node)
        self.held[node] = {}
        self.renewing.pop(node, None)

    @rule(node=NODES)
    def leave(self, node: str) -> None:
        self.blocks.leave(node)
        self.held.pop(node, None)
        self.renewing.pop(node, None)

    @rule(node=NODES, numbers=KEYS, tier=st.sampled_from(Tier))
    def store(self, node: str, numbers: list[int], tier: Tier) -> None:
        if node in self.held:
            self.blocks.store(node, packed(numbers), tier)
            self.held[node].update(dict.fromkeys(numbers, tier))
            self.renewing.get(node, set()).update(numbers)

    @rule(node=NODES, numbers=KEYS)
    def remove(self, node: str, numbers: list[int]) -> None:
        if node in self.held:
            self.blocks.remove(node, packed(numbers))
            for number in numbers:
                self.held[node].pop(number, None)
                self.renewing.get(node, set()).discard(number)

    @rule(node=NODES)
    def begin(self, node: str) -> None:
        if node in self.held:
            self.blocks.begin(node)
            self.renewing[node] = set()

    @rule(node=NODES)
    def complete(self, node: str) -> None:
        if node in self.held:
            self.blocks.complete(node)
            if node in self.renewing:
                kept = self.renewing.pop(node)
                self.held[node] = {n: tier for n, tier in self.held[node].items() if n in kept}
            while self.blocks.sweep(2):
                pass

    @rule(budget=st.integers(1, 5))
    def sweep(self, budget: int) -> None:
        self.blocks.sweep(budget)

    @invariant()
    def same(self) -> None:
        self.blocks.check_integrity()
        for node, held in self.held.items():
            assert self.blocks.held_by(node) == {key(number) for number in held}
            assert all(self.blocks.tier_of(node, key(number)) is tier for number, tier in held.items())
            assert self.blocks.num_held(node) == len(held)
        for number in {number for held in self.held.values() for number in held}:
            tiers = Counter(held[number] for held in self.held.values() if number in held)
            assert self.blocks.tiers_of(key(number)) == tiers


@pytest.mark.slow
def test_the_map_equals_plain_sets() -> None:
    run_state_machine_as_test(
        MapAgainstSets, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
