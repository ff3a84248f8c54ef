"""Laws of the map from blocks to nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index import key_table as key_table_module
from moonpool.kvstore.index.block_map import BlockMap
from moonpool.kvstore.index.key_table import NUM_PARTS, CompiledKeyTable, KeyTable, PlainKeyTable
from moonpool.runtime.machine import compiled_library

NODES = st.sampled_from(["a", "b", "c", "d"])
KEYS = st.lists(st.integers(0, 30), max_size=12, unique=True)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def packed(numbers: list[int]) -> bytes:
    return b"".join(map(key, numbers))


TABLES = pytest.mark.parametrize("new_table", [CompiledKeyTable, PlainKeyTable])


def chain_map(lengths: dict[str, int], new_table: Callable[[], KeyTable] = CompiledKeyTable) -> BlockMap:
    blocks = BlockMap(new_table)
    for node_id, length in lengths.items():
        blocks.join(node_id)
        blocks.store(node_id, packed(list(range(length))), Tier.POOL)
    return blocks


@TABLES
@given(
    lengths=st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.integers(0, 40)),
    asked=st.integers(0, 50),
)
def test_the_longest_prefix_is_found_on_every_node(
    new_table: Callable[[], KeyTable], lengths: dict[str, int], asked: int
) -> None:
    found = chain_map(lengths, new_table).longest_prefix([key(number) for number in range(asked)])
    assert found == {node: min(length, asked) for node, length in lengths.items() if length and asked}


@TABLES
def test_a_thousand_nodes_have_a_bit_each(new_table: Callable[[], KeyTable]) -> None:
    lengths = {f"node-{number}": number % 97 + 1 for number in range(1100)}
    blocks = chain_map(lengths, new_table)
    assert blocks.longest_prefix([key(number) for number in range(128)]) == lengths
    blocks.check_integrity()


@TABLES
def test_a_node_that_left_is_gone_before_it_is_swept_and_its_bit_is_not_used_until_then(
    new_table: Callable[[], KeyTable],
) -> None:
    blocks = chain_map({"a": 5000, "b": 10}, new_table)
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


@TABLES
def test_what_is_said_anew_replaces_what_was_known_without_a_moment_of_nothing(
    new_table: Callable[[], KeyTable],
) -> None:
    blocks = chain_map({"a": 8}, new_table)
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


@TABLES
def test_sets_of_nodes_that_hold_nothing_any_more_are_used_again(new_table: Callable[[], KeyTable]) -> None:
    nodes = [f"node-{number}" for number in range(12)]
    blocks = chain_map(dict.fromkeys(nodes, 1), new_table)
    for turn in range(1 << 12):
        # Another set in each turn, of those nodes whose bit is 1 in its number.
        holders = [node for bit, node in enumerate(nodes) if turn >> bit & 1]
        for node in holders:
            blocks.store(node, packed([100]), Tier.POOL)
        assert blocks.tiers_of(key(100)) == ({Tier.POOL: len(holders)} if holders else {})
        for node in holders:
            blocks.remove(node, packed([100]))
    assert len(blocks._sets) < 1 << 11
    blocks.check_integrity()


@TABLES
def test_blocks_stored_during_a_sweep_stay_whatever_sets_were_free_when_it_began(
    new_table: Callable[[], KeyTable],
) -> None:
    blocks = chain_map({"a": 400, "b": 300}, new_table)
    blocks.store("b", packed([999]), Tier.SSD)
    blocks.remove("b", packed([999]))
    blocks.leave("a")
    blocks._sets.free_unused(blocks._keys.counts(len(blocks._sets)))
    assert blocks._sets._free
    assert blocks.sweep(1)
    for tier in Tier:
        blocks.store("b", packed([1000 + tier, 1255 - tier]), tier)
        blocks.join(f"c{tier}")
        blocks.store(f"c{tier}", packed([0, 200, 255]), Tier.POOL)
    while blocks.sweep(7):
        pass
    blocks.check_integrity()
    assert blocks.num_blocks == 306
    assert [blocks.num_held(node) for node in ("b", "c0", "c1", "c2")] == [306, 3, 3, 3]


@TABLES
def test_a_table_that_grew_and_shrank_has_what_was_put_into_it(new_table: Callable[[], KeyTable]) -> None:
    table = new_table()
    keys = [key(number * 7919) for number in range(30_000)]
    assert table.move(b"".join(keys), lambda _: (3, 1), 0) == len(keys)
    assert table.move(b"".join(keys[:50]), lambda before: (before + 1, 0), 3) == 0
    assert table.runs(keys) == [(50, 4), (len(keys), 3)]
    assert table.runs([*keys[:20], bytes(15), keys[20]]) == [(20, 4)]
    assert table.runs([b"unknown key 0123", *keys]) == []
    to = np.array([0, 1, 2, 0, 5], np.uint32)
    assert sum(table.replace(part, to) for part in range(NUM_PARTS)) == len(keys)
    assert len(table) == 50
    assert table.counts(6).tolist() == [0, 0, 0, 0, 0, 50]
    found, sets = table.select(0, 1, np.ones(6, np.uint8))
    assert (set(found), set(sets)) == (set(keys[:50]), {5})
    some, _ = table.select(1, 2, np.ones(6, np.uint8))
    assert set(some) == {each for each in keys[:50] if each[-1] % 2}
    assert table.move(b"".join(keys[:50]), lambda _: (0, -1), 5) == -50
    assert len(table) == 0


def test_a_key_that_is_not_bytes_is_an_error() -> None:
    with pytest.raises(TypeError):
        CompiledKeyTable().runs([5])  # type: ignore[list-item]


def test_without_a_compiler_a_dict_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    key_table_module._library.cache_clear()
    key_table_module._kind.cache_clear()
    monkeypatch.setattr(compiled_library, "find_compiler", lambda: None)
    try:
        assert isinstance(key_table_module.key_table(), PlainKeyTable)
    finally:
        key_table_module._kind.cache_clear()


class MapAgainstSets(RuleBasedStateMachine):
    """Any history of joins, changes, renewals, departures and sweeps leaves what plain sets would hold."""

    new_table: Callable[[], KeyTable] = CompiledKeyTable

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockMap(type(self).new_table)
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

    @rule()
    def reuse(self) -> None:
        self.blocks._sets._free_beyond = 0

    @rule(budget=st.integers(1, 300))
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


class PlainMapAgainstSets(MapAgainstSets):
    new_table = PlainKeyTable


@pytest.mark.slow
@pytest.mark.parametrize("machine", [MapAgainstSets, PlainMapAgainstSets])
def test_the_map_equals_plain_sets(machine: type[MapAgainstSets]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
