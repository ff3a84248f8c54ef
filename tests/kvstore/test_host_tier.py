"""Laws of the host tier, under every eviction policy."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from xxhash import xxh3_64_intdigest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.errors import LayoutError, StoreError
from moonpool.kvstore.eviction import POLICIES, make_policy
from moonpool.kvstore.eviction.chain_cache import ChainCache
from moonpool.kvstore.eviction.prefix import Prefix
from moonpool.kvstore.tiers.host import HostTier
from moonpool.runtime.config.options import EVICTION_POLICIES
from tests.kvstore.nodes import chain, key

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=4, head_dim=4, dtype="float32")
NBYTES = LAYOUT.block_nbytes


def tier(num_blocks: int, policy: str = "lru") -> HostTier:
    return HostTier(np.zeros(num_blocks * NBYTES + 5, np.uint8), LAYOUT, policy=policy)


def payload(name: BlockKey) -> np.ndarray:
    return np.frombuffer(random.Random(name).randbytes(NBYTES), np.uint8)


def put(host: HostTier, name: BlockKey, parent: BlockKey | None = None) -> int | None:
    slot = host.slot_of(name)
    if slot is None and (slot := host.reserve(name, parent)) is not None:
        host.bytes_of(slot)[:] = payload(name)
        host.fill(slot, name, parent, xxh3_64_intdigest(payload(name).data))
    return slot


def put_chain(host: HostTier, length: int, number: int = 0) -> list[int | None]:
    keys = chain(length, number)
    return [put(host, k, keys[i - 1] if i else None) for i, k in enumerate(keys)]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_put_is_there_byte_for_byte(policy: str) -> None:
    host = tier(8, policy)
    put_chain(host, 6)
    slots = host.match(chain(8))
    assert len(slots) == 6
    for slot, name in zip(slots, chain(6), strict=True):
        assert np.array_equal(host.bytes_of(slot), payload(name))
        assert host.offset_of(slot) == slot * NBYTES
        assert host.is_intact(slot)
    host.bytes_of(slots[2])[3] ^= 1
    assert not host.is_intact(slots[2])
    host.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_shrinks_from_its_end(policy: str) -> None:
    host = tier(8, policy)
    put_chain(host, 8)
    host.use(chain(8))
    for added in range(1, 6):
        put_chain(host, added, number=1)
        assert len(host.match(chain(8))) + len(host.match(chain(8, 1))) == len(host)
    host.check_integrity()


def test_the_least_recently_used_chain_goes_first() -> None:
    host = tier(9)
    for number in range(3):
        put_chain(host, 3, number)
    host.use(chain(3, 0))
    put_chain(host, 2, 3)
    assert [len(host.match(chain(3, number))) for number in range(4)] == [3, 1, 3, 2]


def test_pinned_blocks_stay_and_a_tier_full_of_pins_refuses() -> None:
    evicted: list[BlockKey] = []
    host = HostTier(
        np.zeros(4 * NBYTES, np.uint8), LAYOUT, on_evicted=lambda name, slot: evicted.append(name)
    )
    put_chain(host, 4)
    slots = host.match(chain(4))
    host.pin(slots[:3])
    host.pin(slots[:3])
    assert put_chain(host, 2, 1) == [slots[3], None]
    assert evicted == [key(3)]  # a chain's start is not eaten to make room for its end
    assert host.num_refusals == 1
    host.unpin(slots[:3])
    assert put(host, key(0, 2)) == slots[3]
    assert put(host, key(0, 3)) == slots[3]
    host.unpin(slots[:3])
    assert put(host, key(0, 4)) is not None
    assert host.num_pinned == 0
    host.check_integrity()


def test_a_block_that_is_removed_takes_what_follows_and_pins_keep_only_bytes() -> None:
    host = tier(5)
    put_chain(host, 5)
    slots = host.match(chain(5))
    host.pin(slots[:4])
    assert host.remove(key(2)) == [key(4), key(3), key(2)]
    assert host.remove(key(2)) == []
    assert len(host.match(chain(5))) == 2
    put_chain(host, 3, 1)
    assert all(np.array_equal(host.bytes_of(slot), payload(key(i))) for i, slot in enumerate(slots[:4]))
    host.unpin(slots[:4])
    host.check_integrity()


def test_a_chain_that_comes_end_first_is_linked_as_it_comes() -> None:
    # The engine's pool evicts leaf first: the end of a chain arrives before its start.
    host = tier(4)
    keys = chain(4)
    for i in (3, 2, 1, 0):
        put(host, keys[i], keys[i - 1] if i else None)
    assert len(host.match(keys)) == 4
    put(host, key(0, 1))
    assert len(host.match(keys)) == 3
    host.check_integrity()


def test_memory_for_no_block_and_an_unknown_policy_are_refused() -> None:
    with pytest.raises(LayoutError, match="hold no block"):
        HostTier(np.zeros(8, np.uint8), LAYOUT)
    with pytest.raises(StoreError, match="random"):
        make_policy("random", 5)


class AnyHistory(RuleBasedStateMachine):
    """Puts, uses, pins and removals in any order: what is found is right, and pinned bytes never move."""

    policies: tuple[str, ...] = tuple(POLICIES)

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def make(self, policy: str) -> None:
        self.host = tier(7, policy)
        self.pinned: list[tuple[list[int], list[bytes]]] = []

    @rule(number=st.integers(0, 3), length=st.integers(1, 9))
    def serve(self, number: int, length: int) -> None:
        """As a request does: use what is there, add the rest behind it, all of it pinned meanwhile."""
        keys = chain(length, number)
        self.host.use(keys)
        slots = self.host.match(keys)
        self.host.pin(slots)
        for i in range(len(slots), length):
            slot = put(self.host, keys[i], keys[i - 1] if i else None)
            if slot is None:
                break
            self.host.pin([slot])
            slots.append(slot)
        self.host.unpin(slots)

    @rule(number=st.integers(0, 3), first=st.integers(0, 8))
    def arrive_end_first(self, number: int, first: int) -> None:
        keys = chain(first + 1, number)
        put(self.host, keys[first], keys[first - 1] if first else None)

    @rule(number=st.integers(0, 3), length=st.integers(1, 9))
    def pin(self, number: int, length: int) -> None:
        slots = self.host.match(chain(length, number))
        self.host.pin(slots)
        self.pinned.append((slots, [self.host.bytes_of(slot).tobytes() for slot in slots]))

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.host.unpin(self.pinned.pop(0)[0])

    @rule(number=st.integers(0, 3), block=st.integers(0, 8))
    def remove(self, number: int, block: int) -> None:
        self.host.remove(key(block, number))

    @invariant()
    def right(self) -> None:
        self.host.check_integrity()
        for slots, held in self.pinned:
            assert [self.host.bytes_of(slot).tobytes() for slot in slots] == held
        for name in list(self.host.keys()):
            slot = self.host.slot_of(name)
            assert slot is not None
            assert np.array_equal(self.host.bytes_of(slot), payload(name))


@pytest.mark.slow
def test_any_history_leaves_a_sound_tier() -> None:
    run_state_machine_as_test(
        AnyHistory, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )


def test_a_reserved_slot_is_found_only_once_it_is_committed() -> None:
    host = tier(3)
    first, second = key(1), key(2)
    slot = host.reserve(first, None)
    assert slot is not None
    host.bytes_of(slot)[:] = payload(first)
    assert host.match([first]) == []
    host.check_integrity()
    assert host.fill(slot, first, None, 7) == slot
    assert host.match([first]) == [slot]
    assert host.checksum_of(slot) == 7
    other = host.reserve(second, first)
    assert other is not None
    host.abandon(other)
    assert second not in host
    assert host.num_free == 2
    host.check_integrity()


def test_the_second_to_commit_a_block_gets_the_first_ones_slot() -> None:
    host = tier(3)
    slots = [host.reserve(key(1), None) for _ in range(2)]
    assert None not in slots
    assert host.fill(slots[1], key(1), None, 7) == slots[1]
    assert host.fill(slots[0], key(1), None, 8) == slots[1]
    assert host.checksum_of(slots[1]) == 7
    assert host.num_free == 2
    host.check_integrity()


def test_what_prefix_remembers_stays_bounded_behind_a_block_that_is_held_unused() -> None:
    policy = Prefix(16)
    cache: ChainCache[BlockKey] = ChainCache(16, policy)
    cache.adopt([(key(0), None, 0)])
    for number in range(1, 6000):
        cache.use(chain(8, number))
        assert len(policy._seen) <= policy._max_seen
    assert cache.match([key(0)]) == [0]
    assert cache.evict()
    assert key(0) not in cache
    cache.check_integrity()


def test_the_options_know_every_policy() -> None:
    assert set(EVICTION_POLICIES) == set(POLICIES)
