"""Blocks that clients keep: bounded by tenant and in all, until their time ends."""

from __future__ import annotations

import pytest

from moonpool.kvstore.eviction import POLICIES
from moonpool.kvstore.eviction.chain_cache import ChainCache
from moonpool.kvstore.eviction.kept_blocks import KeptBlocks
from moonpool.kvstore.eviction.surplus_copies import SurplusCopies


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_is_kept_ends_and_a_later_end_stays() -> None:
    clock = Clock()
    kept: KeptBlocks[str] = KeptBlocks(8, clock)
    assert not kept
    assert kept.keep("t", "ab", 60.0, 8) == 2
    assert kept.keep("t", "a", 5.0, 8) == 1
    clock.now_s += 30.0
    assert "a" in kept
    assert "c" not in kept
    assert kept.keep("t", "c", 60.0, 8) == 1
    clock.now_s += 31.0
    assert "a" not in kept
    assert "c" in kept
    kept.keep("t", "d", 1.0, 8)
    assert (len(kept), kept.num_kept("t")) == (2, 2), "what has ended is still there"
    kept.forget("cdx")
    assert not kept


def test_each_tenant_and_all_together_have_bounds() -> None:
    clock = Clock()
    kept: KeptBlocks[str] = KeptBlocks(6, clock)
    assert kept.keep("t", "abcde", 60.0, 3) == 3
    assert "d" not in kept, "the beginning of the chain is worth most"
    assert kept.keep("t", "xy", 60.0, 3) == 0
    assert kept.keep("t", "abc", 90.0, 3) == 3, "what is kept already counts once"
    assert kept.keep("u", "mnopq", 60.0, 9) == 3
    clock.now_s += 61.0
    assert kept.keep("u", "mnopq", 60.0, 9) == 3, "of six, another tenant keeps three for 29 s more"
    clock.now_s += 30.0
    assert kept.keep("u", "mnopq", 60.0, 9) == 5


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_tier_evicts_kept_blocks_last_and_dropped_ones_first(policy: str) -> None:
    evicted: list[str] = []
    cache: ChainCache[str] = ChainCache(6, POLICIES[policy](6), on_evicted=lambda key, _: evicted.append(key))
    cache.kept = KeptBlocks(6)
    for chain in ("ab", "cd", "ef"):
        cache.use(chain)
        for i, key in enumerate(chain):
            assert cache.add(key, chain[i - 1] if i else None) is not None
    cache.kept.keep("t", "ab", 60.0, 6)
    cache.surplus.drop("ef")
    while cache.evict():
        cache.check_integrity()
    assert evicted == ["f", "e", "d", "c", "b", "a"]


def test_what_was_let_go_stays_once_it_is_used() -> None:
    copies: SurplusCopies[str] = SurplusCopies()
    copies.drop("abc")
    assert list(copies.unused()) == ["c", "b", "a"]
    copies.use("ab")
    assert list(copies.unused()) == ["c"]
    assert "a" not in copies
