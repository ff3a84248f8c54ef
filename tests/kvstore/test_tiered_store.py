"""Laws of the store over its tiers: host memory, a pool above it, a disk below."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvstore.errors import BlockCorrupt, BlockMissing
from kvstore.keys import BlockKey
from kvstore.layout import KVLayout
from kvstore.store import TieredStore
from kvstore.surplus import Surplus
from kvstore.tier import Tier
from runtime.options import HostTierOptions, SsdTierOptions, StoreOptions
from tests.kvstore.fake_pool import FakePool
from tests.kvstore.memory_disk import MemoryDisk
from tests.kvstore.nodes import chain, key

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=4, head_dim=4, dtype="float32")
NBYTES = LAYOUT.block_nbytes
LRU = StoreOptions(host=HostTierOptions(policy="lru"), ssd=SsdTierOptions(queue_nbytes=64 * NBYTES))


def payload(name: BlockKey) -> np.ndarray:
    return np.frombuffer(random.Random(name).randbytes(NBYTES), np.uint8)


class Listener:
    """What the index would be told."""

    def __init__(self) -> None:
        self.tiers: dict[BlockKey, Tier] = {}

    def __call__(self, name: BlockKey, tier: Tier | None) -> None:
        if tier is None:
            self.tiers.pop(name, None)
        else:
            self.tiers[name] = tier


def make(num_blocks: int, options: StoreOptions = LRU, **kwargs: Any) -> TieredStore:
    return TieredStore(LAYOUT, options, np.zeros(num_blocks * NBYTES, np.uint8), **kwargs)


async def put(store: TieredStore, length: int, number: int = 0) -> int:
    keys = chain(length, number)
    return await store.put(keys, [payload(k) for k in keys])


async def get(store: TieredStore, length: int, number: int = 0) -> list[Tier]:
    keys = chain(length, number)
    spans = [np.zeros(NBYTES, np.uint8) for _ in keys]
    tiers = await store.get(keys, spans)
    for name, span in zip(keys, spans, strict=True):
        assert np.array_equal(span, payload(name))
    return tiers


async def test_what_was_put_is_got_and_what_was_not_is_missing() -> None:
    store = make(8)
    assert await put(store, 5) == 5
    assert await get(store, 5) == [Tier.HOST] * 5
    spans = [np.zeros(NBYTES, np.uint8) for _ in range(7)]
    with pytest.raises(BlockMissing) as missing:
        await store.get(chain(7), spans)
    assert missing.value.first_missing == 5
    assert np.array_equal(spans[4], payload(key(4)))
    assert store.match(chain(7)) == [Tier.HOST] * 5
    store.check_integrity()
    await store.close()


async def test_a_run_continues_only_what_is_held() -> None:
    store = make(8)
    await put(store, 2)
    more = chain(4)[2:]
    assert await store.put(more, [payload(k) for k in more], parent=key(1)) == 2
    assert await get(store, 4) == [Tier.HOST] * 4
    assert await store.put([key(9)], [payload(key(9))], parent=key(8)) == 0
    assert key(9) not in store.host
    store.check_integrity()


async def test_a_block_that_changed_in_memory_is_a_counted_miss() -> None:
    store = make(8)
    await put(store, 4)
    store.host.bytes_of(store.host.match(chain(4))[2])[7] ^= 1
    with pytest.raises(BlockCorrupt) as corrupt:
        await get(store, 4)
    assert corrupt.value.first_missing == 2
    assert len(store.match(chain(4))) == 2
    store.check_integrity()


async def test_a_put_whose_checksum_is_wrong_keeps_nothing() -> None:
    store = make(8)
    with pytest.raises(BlockCorrupt):
        await store.put([key(0)], [payload(key(0))], checksums=[1])
    assert store.match([key(0)]) == []
    assert store.host.num_free == 8
    store.check_integrity()


async def test_nobody_finds_a_block_before_it_is_complete() -> None:
    store = make(8)
    with store.reserve(chain(3)) as reservation:
        assert len(reservation.spans) == 3
        assert store.match(chain(3)) == []
        for name, span in zip(chain(3), reservation.spans, strict=True):
            span[:] = payload(name)
        assert reservation.commit() == 3
    assert await get(store, 3) == [Tier.HOST] * 3
    with store.reserve(chain(5)) as abandoned:
        assert abandoned.num_held == 3
        assert len(abandoned.slots) == 2
    assert len(store.match(chain(5))) == 3
    assert store.host.num_free == 5
    store.check_integrity()


async def test_leases_keep_blocks_and_end_by_themselves() -> None:
    now = [0.0]
    store = make(4, clock=lambda: now[0])
    await put(store, 4)
    lease = await store.pin(chain(6), ttl_s=5.0)
    assert [store.host.bytes_of(b.slot).tobytes() for b in lease.blocks] == [
        payload(k).tobytes() for k in chain(4)
    ]
    assert await put(store, 2, number=1) == 0  # a store full of pins refuses
    assert await get(store, 4) == [Tier.HOST] * 4
    now[0] = 4.9
    assert store.sweep() == 0
    now[0] = 5.0
    assert store.sweep() == 1
    store.release(lease.id)
    assert await put(store, 2, number=1) == 2
    assert (await store.pin(chain(3, number=7), ttl_s=1.0)).id == 0
    store.check_integrity()


async def test_a_lease_from_the_middle_of_a_chain_keeps_what_is_before_it() -> None:
    store = make(4)
    await put(store, 4)
    lease = await store.pin(chain(4)[2:], ttl_s=5.0)
    assert len(lease.blocks) == 2
    assert await put(store, 1, number=1) == 0
    assert len(store.match(chain(4))) == 4
    store.release(lease.id)
    store.check_integrity()


async def test_the_pool_s_blocks_go_to_host_memory() -> None:
    heard, pool = Listener(), FakePool()
    store = pool.store = make(8, pool=pool, on_change=heard)
    for i, name in enumerate(chain(4)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    assert store.match(chain(5)) == [Tier.POOL] * 4
    pool.evict(key(0))
    pool.evict(key(0))
    assert store.match(chain(5)) == [Tier.POOL, Tier.POOL, Tier.HOST, Tier.HOST]
    assert heard.tiers == {key(2): Tier.HOST, key(3): Tier.HOST}
    assert await get(store, 4) == [Tier.POOL, Tier.POOL, Tier.HOST, Tier.HOST]
    lease = await store.pin(chain(4), 1.0)
    assert [block.tier for block in lease.blocks] == [Tier.POOL, Tier.POOL, Tier.HOST, Tier.HOST]
    assert pool.num_holds == 2
    assert not pool.evict(key(0))
    store.release(lease.id)
    assert pool.num_holds == 0
    store.check_integrity()


async def test_what_the_pool_drops_as_surplus_is_kept_nowhere() -> None:
    heard, pool = Listener(), FakePool()
    store = pool.store = make(8, pool=pool, on_change=heard)
    for i, name in enumerate(chain(2)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    store.demote(key(1), key(0), payload(key(1)), surplus=True)
    assert store.host.stats.num_held == 0
    store.demote(key(1), key(0), payload(key(1)))
    assert store.host.stats.num_held == 1


async def test_what_follows_a_lost_block_is_lost_too() -> None:
    heard, pool = Listener(), FakePool()
    store = pool.store = make(2, pool=pool, on_change=heard)
    for i, name in enumerate(chain(3)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    pool.evict(key(0))
    await put(store, 1, number=1)
    lease = await store.pin(chain(1, number=1), 5.0)
    other = await store.pin([key(2)], 5.0)
    # Both slots are pinned: the next block has nowhere to go, and the one after it is out of reach.
    pool.evict(key(0))
    assert store.match(chain(3)) == [Tier.POOL]
    assert heard.tiers == {key(0, 1): Tier.HOST}
    store.release(lease.id)
    store.release(other.id)
    store.check_integrity()


# ------------------------------------------------------------------ with a disk


async def with_disk(
    num_blocks: int,
    num_on_disk: int,
    *,
    write_policy: str = "write-back",
    watermark: float = 0.5,
    **kwargs: Any,
) -> tuple[TieredStore, MemoryDisk]:
    disk = MemoryDisk(num_on_disk)
    options = replace(LRU, write_policy=write_policy, host=HostTierOptions(policy="lru", watermark=watermark))
    store = make(num_blocks, options, ssd=disk, **kwargs)
    await store.start()
    return store, disk


async def settled(store: TieredStore) -> None:
    """Nothing waits to be written."""
    await store._holdings.writer.flush()


async def test_write_back_writes_what_host_memory_evicts_and_what_is_before_it() -> None:
    heard = Listener()
    store, disk = await with_disk(8, 64, on_change=heard)
    await put(store, 8)
    await settled(store)
    # Half of host memory is to be free; the end of the chain left, and its beginning went along.
    assert disk.keys() == chain(len(disk))
    assert len(disk) == 8
    assert store.match(chain(8)) == [Tier.HOST] * 6 + [Tier.SSD] * 2
    assert heard.tiers == dict(zip(chain(8), store.match(chain(8)), strict=True))
    assert await get(store, 8) == [Tier.HOST] * 6 + [Tier.SSD] * 2
    store.check_integrity()
    await store.close()


async def test_a_cold_copy_for_busy_times_goes_first_and_is_not_written() -> None:
    now_s = 0.0
    store, disk = await with_disk(8, 64)
    store.host._cache.surplus = Surplus(clock=lambda: now_s)
    await put(store, 2)
    await put(store, 1, number=1)
    store.host.surplus.mark(chain(1, number=1))
    await put(store, 1, number=2)
    await put(store, 1, number=3)  # more than the watermark allows
    await settled(store)
    assert disk.keys() == chain(2), "the copy is still wanted"
    now_s = 60.0
    await put(store, 1, number=4)
    await settled(store)
    assert store.tier_of(key(0, 1)) is None
    assert disk.keys() == chain(2), "what goes is the copy, and it goes for good"
    store.check_integrity()
    await store.close()


async def test_write_through_writes_at_once_from_pool_and_host() -> None:
    pool = FakePool()
    store, disk = await with_disk(8, 64, write_policy="write-through", pool=pool)
    pool.store = store
    for i, name in enumerate(chain(3)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    await put(store, 2, number=1)
    await settled(store)
    assert sorted(disk.keys()) == sorted(chain(3) + chain(2, 1))
    assert pool.num_holds == 0
    await store.close()


async def test_selective_writes_on_the_second_touch() -> None:
    store, disk = await with_disk(8, 64, write_policy="selective")
    store.use(chain(4))
    await put(store, 4)
    await put(store, 2, number=1)
    await settled(store)
    assert len(disk) == 0
    store.use(chain(4))
    await settled(store)
    assert disk.keys() == chain(4)
    await store.close()


async def test_a_full_queue_drops_the_write_and_blocks_nobody() -> None:
    store, disk = await with_disk(8, 64)
    disk.may_write.clear()
    for number in range(12):
        assert await put(store, 2, number) == 2
    assert store.stats.num_leaving <= 2
    assert await get(store, 2, 11) == [Tier.HOST] * 2
    disk.may_write.set()
    await settled(store)
    store.check_integrity()
    await store.close()


async def test_a_block_on_its_way_to_disk_is_still_there() -> None:
    heard = Listener()
    store, disk = await with_disk(8, 64, on_change=heard)
    disk.may_write.clear()
    await put(store, 8)
    assert store.stats.num_leaving == 2
    assert await get(store, 8) == [Tier.HOST] * 8
    lease = await store.pin(chain(8), 5.0)
    assert len(lease.blocks) == 8
    disk.may_write.set()
    await settled(store)
    assert store.match(chain(8))[7] is Tier.SSD
    store.release(lease.id)
    store.check_integrity()
    await store.close()


async def test_a_disk_that_refuses_loses_blocks_and_says_so() -> None:
    heard = Listener()
    store, disk = await with_disk(8, 64, on_change=heard)
    disk.refuses = True
    await put(store, 8)
    await settled(store)
    assert store.match(chain(8)) == [Tier.HOST] * 6
    assert set(heard.tiers) == set(chain(6))
    store.check_integrity()
    await store.close()


async def test_what_follows_a_block_that_is_lost_on_its_way_to_disk_is_lost_too() -> None:
    heard, pool = Listener(), FakePool()
    store, disk = await with_disk(8, 64, on_change=heard, pool=pool)
    pool.store = store
    disk.may_write.clear()
    await put(store, 2)
    await put(store, 4, number=1)
    assert store.stats.num_leaving == 2
    # Computed again while they are on their way, and continued by one more.
    for i, name in enumerate(chain(3)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    while key(0) in pool:
        pool.evict(key(0))
    assert store.match(chain(3)) == [Tier.HOST] * 3
    disk.refuses = True
    disk.may_write.set()
    await settled(store)
    assert store.match(chain(3)) == []
    assert not heard.tiers.keys() & set(chain(3))
    assert key(2) not in store.host
    store.check_integrity()
    await store.close()


async def test_a_stalled_disk_is_a_miss_and_host_memory_serves_on() -> None:
    store, disk = await with_disk(8, 64)
    await put(store, 8)
    await settled(store)
    disk.is_stalled = True
    with pytest.raises(BlockMissing) as missing:
        await get(store, 8)
    assert missing.value.first_missing == 6
    assert await get(store, 6) == [Tier.HOST] * 6
    assert await put(store, 8, number=1) == 8
    store.check_integrity()
    disk.is_stalled = False
    assert await get(store, 8, number=1) == store.match(chain(8, 1))
    await store.close()


async def test_a_block_gone_bad_on_disk_is_a_miss() -> None:
    heard = Listener()
    store, disk = await with_disk(8, 64, on_change=heard)
    await put(store, 8)
    await settled(store)
    disk.bytes[key(6)][3] ^= 1
    with pytest.raises(BlockMissing) as missing:
        await get(store, 8)
    assert missing.value.first_missing == 6
    assert store.match(chain(8)) == [Tier.HOST] * 6
    assert set(heard.tiers) == set(chain(6))
    store.check_integrity()
    await store.close()


async def test_prefetch_brings_blocks_up_once_for_all_who_ask() -> None:
    store, disk = await with_disk(16, 64, write_policy="write-through")
    await put(store, 6)
    await settled(store)
    await put(store, 16, number=1)
    await settled(store)
    assert store.match(chain(6)) == [Tier.SSD] * 6
    numbers = await asyncio.gather(store.prefetch(chain(6)), store.prefetch(chain(6)), get(store, 6))
    assert numbers[:2] == [6, 6]
    assert disk.num_reads == 6
    assert store.match(chain(6)) == [Tier.HOST] * 6
    store.check_integrity()
    await store.close()


async def test_more_than_host_memory_holds_comes_from_disk_in_one_get() -> None:
    pool = FakePool()
    store, _ = await with_disk(4, 64, write_policy="write-through", watermark=1.0, pool=pool)
    pool.store = store
    for i, name in enumerate(chain(12)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    await settled(store)
    for _ in range(12):
        pool.evict(key(0))
    assert store.match(chain(12)).count(Tier.SSD) == 8
    await get(store, 12)
    store.check_integrity()
    await store.close()


async def test_flush_writes_everything_also_what_only_the_pool_has() -> None:
    pool = FakePool()
    store, disk = await with_disk(64, 64, pool=pool)
    pool.store = store
    for i, name in enumerate(chain(3)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    await put(store, 20, number=1)
    await store.flush(10.0)
    assert sorted(disk.keys()) == sorted(chain(3) + chain(20, 1))
    await store.close()


async def test_removed_blocks_are_in_no_tier() -> None:
    heard = Listener()
    store, disk = await with_disk(8, 64, on_change=heard)
    await put(store, 8)
    await settled(store)
    assert sorted(await store.remove([key(3)])) == chain(8)[3:]
    assert store.match(chain(8)) == [Tier.HOST] * 3
    assert set(heard.tiers) == set(chain(3))
    assert len(disk) == 3
    store.check_integrity()
    await store.close()


async def test_verify_finds_and_drops_what_changed() -> None:
    store, disk = await with_disk(8, 64)
    await put(store, 8)
    await settled(store)
    seen: list[tuple[int, int]] = []
    assert await store.verify(lambda done, total: seen.append((done, total))) == []
    assert seen[-1] == (14, 14)
    store.host.bytes_of(store.host.slot_of(key(1)))[0] ^= 1
    disk.bytes[key(5)][0] ^= 1
    assert sorted(await store.verify()) == [key(1), key(5)]
    store.check_integrity()
    await store.close()


# ------------------------------------------------------------------ any sequence of calls


class StoreMachine(RuleBasedStateMachine):
    """Pool, host memory and disk: what the store says it has is byte-exact, it holds prefixes, and the
    listener knows exactly what is held."""

    @initialize(
        write_policy=st.sampled_from(["write-back", "write-through", "selective"]),
        policy=st.sampled_from(["lru", "prefix", "s3fifo"]),
        num_blocks=st.integers(2, 12),
    )
    def start(self, write_policy: str, policy: str, num_blocks: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.heard = Listener()
        self.pool = FakePool()
        options = StoreOptions(
            write_policy=write_policy,
            host=HostTierOptions(policy=policy, watermark=0.7),
            ssd=SsdTierOptions(queue_nbytes=4 * NBYTES),
        )

        async def begin() -> None:
            self.disk = MemoryDisk(10)
            self.store = make(num_blocks, options, pool=self.pool, ssd=self.disk, on_change=self.heard)
            await self.store.start()

        self.loop.run_until_complete(begin())
        self.pool.store = self.store
        self.leases: list[Any] = []

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @rule(length=st.integers(1, 6), number=st.integers(0, 3))
    def put(self, length: int, number: int) -> None:
        self.store.use(chain(length, number))
        assert self.run(put(self.store, length, number)) <= length

    @rule(length=st.integers(1, 6), number=st.integers(0, 3))
    def compute(self, length: int, number: int) -> None:
        for i, name in enumerate(chain(length, number)):
            self.pool.seal(name, key(i - 1, number) if i else None, payload(name))
            self.heard(name, Tier.POOL)

    @rule(number=st.integers(0, 3))
    def evict_from_pool(self, number: int) -> None:
        if key(0, number) in self.pool:
            self.pool.evict(key(0, number))

    @rule(length=st.integers(1, 6), number=st.integers(0, 3))
    def get(self, length: int, number: int) -> None:
        held_keys = chain(length, number)
        held = self.store.match(held_keys)
        damaged = any(name in self.disk and not self.disk._is_intact(name) for name in held_keys)
        # A write that goes on meanwhile may push out of the disk what is about to be read.
        may_miss = damaged or not self.store._holdings.writer._idle.is_set()
        try:
            self.run(get(self.store, len(held), number))
        except BlockMissing:
            if not may_miss:
                raise

    @rule(length=st.integers(1, 6), number=st.integers(0, 3))
    def pin(self, length: int, number: int) -> None:
        keys = chain(length, number)
        lease = self.run(self.store.pin(keys, 5.0))
        if lease.id:
            self.leases.append((lease, keys))

    @rule()
    def release(self) -> None:
        if self.leases:
            self.store.release(self.leases.pop(0)[0].id)

    @rule(number=st.integers(0, 3), position=st.integers(0, 4))
    def remove(self, number: int, position: int) -> None:
        self.run(self.store.remove([key(position, number)]))

    @rule(number=st.integers(0, 3), position=st.integers(0, 5))
    def damage_disk(self, number: int, position: int) -> None:
        name = key(position, number)
        if name in self.disk:
            self.disk.bytes[name][0] ^= 1

    @rule()
    def let_the_disk_work(self) -> None:
        self.disk.may_write.set()
        self.run(settled(self.store))

    @rule()
    def hold_the_disk_up(self) -> None:
        self.disk.may_write.clear()

    @rule()
    def refuse(self) -> None:
        self.disk.refuses = not self.disk.refuses

    @invariant()
    def leased_bytes_stay(self) -> None:
        for lease, keys in getattr(self, "leases", ()):
            for name, block in zip(keys, lease.blocks, strict=False):
                tier = self.pool if block.tier is Tier.POOL else self.store.host
                assert tier.bytes_of(block.slot).tobytes() == payload(name).tobytes()

    @invariant()
    def the_listener_knows_what_is_held(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()
            assert dict(self.store.held()) == self.heard.tiers
            for number in range(4):
                held = [name for name in chain(8, number) if self.store.tier_of(name) is not None]
                assert held == chain(len(held), number), "a hole in a chain"

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for lease, _ in self.leases:
                self.store.release(lease.id)
            self.let_the_disk_work()
            assert self.pool.num_holds == 0
            assert self.store.host.stats.num_pinned == 0
            self.run(self.store.close())
            self.loop.close()


def test_any_sequence_of_calls() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )
