"""Laws of the store over host memory and a disk below it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import BlockMissing
from moonpool.kvstore.eviction.surplus_copies import SurplusCopies
from moonpool.kvstore.store import DiskWait, TieredStore
from moonpool.kvstore.tiers.ssd import SsdTier
from moonpool.kvstore.tiers.ssd.files.directory import PAGE_NBYTES
from moonpool.runtime.config.options import SsdTierOptions, StoreOptions
from tests.kvstore.fake_pool import FakePool
from tests.kvstore.memory_disk import MemoryDisk
from tests.kvstore.nodes import chain, key
from tests.kvstore.small_store import (
    LAYOUT,
    LRU,
    NBYTES,
    Listener,
    get,
    make,
    payload,
    put,
    settled,
    with_disk,
)


async def writes_under_way(store: TieredStore, disk: MemoryDisk) -> None:
    """Three writes that wait for the disk: more blocks stay in the queue until ``disk.may_write``."""
    disk.may_write.clear()
    for number in (1, 2, 3):
        await put(store, 1, number)
        store.write(key(0, number))
        while not store.writes.is_writing(chain(1, number)):  # noqa: ASYNC110
            await asyncio.sleep(0)


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
    store.host.surplus = SurplusCopies(clock=lambda: now_s)
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


@pytest.mark.parametrize("remote", [False, True])
async def test_write_through_writes_at_once_from_pool_and_host(remote) -> None:
    pool = FakePool(loop=asyncio.get_running_loop() if remote else None)
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
    assert store.stats.num_demoting <= 2
    assert await get(store, 2, 11) == [Tier.HOST] * 2
    disk.may_write.set()
    await settled(store)
    store.check_integrity()
    await store.close()


async def test_blocks_queued_and_being_written_stay_within_the_budget() -> None:
    store, disk = await with_disk(64, 64, write_policy="write-through", queue_blocks=6)
    writes = store.writes
    disk.may_write.clear()
    for number in range(10):
        assert await put(store, 2, number) == 2
        await asyncio.sleep(0)
        assert writes.used_nbytes <= 6 * NBYTES
    assert writes.used_nbytes == 6 * NBYTES, "what is being written counts too"
    disk.may_write.set()
    await settled(store)
    assert len(disk) == 6
    await store.flush(60.0)
    assert len(disk) == 20
    store.check_integrity()
    await store.close()


async def test_a_removed_block_does_not_come_back_from_a_write_that_had_begun() -> None:
    store, disk = await with_disk(8, 64, write_policy="write-through")
    disk.may_write.clear()
    await put(store, 4)
    for _ in range(20):
        await asyncio.sleep(0)
    assert store.writes.is_writing(chain(4))
    removal = asyncio.ensure_future(store.remove(chain(4)[1:2]))
    await asyncio.sleep(0)
    assert store.match(chain(4)) == [Tier.HOST]
    disk.may_write.set()
    assert sorted(await removal) == sorted(chain(4)[1:])
    await settled(store)
    assert store.match(chain(4)) == [Tier.HOST]
    assert disk.keys() == chain(1)
    store.check_integrity()
    await store.close()


async def test_a_removed_block_does_not_come_back_from_a_read_that_had_begun() -> None:
    store, disk = await with_disk(8, 64)
    await put(store, 4)
    await store.flush(60.0)
    store.remove_from_host(chain(4))
    assert store.match(chain(4)) == [Tier.SSD] * 4
    disk.may_read.clear()
    reading = asyncio.ensure_future(store.prefetch(chain(4)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert disk.num_reads
    await store.remove(chain(4))
    disk.may_read.set()
    assert await reading == 0
    assert store.match(chain(4)) == []
    store.check_integrity()
    await store.close()


async def test_a_required_block_is_not_evicted_before_it_is_written() -> None:
    store, disk = await with_disk(
        8, 64, write_policy="write-through", queue_blocks=1, keep_until_written=True
    )
    disk.may_write.clear()
    assert await put(store, 6) == 6
    room = asyncio.ensure_future(store.room())
    assert await put(store, 4, number=1) == 2, "required blocks make no room for others"
    assert not room.done()
    assert store.match(chain(6)) == [Tier.HOST] * 6
    store.check_integrity()
    disk.may_write.set()
    await room
    await settled(store)
    assert len(disk) == 8
    assert await put(store, 4, number=2) == 4
    assert len(await get(store, 6)) == 6
    store.check_integrity()
    await store.close()


async def test_predecessors_of_required_blocks_count_as_pinned_memory() -> None:
    store, disk = await with_disk(8, 64, write_policy="write-through", keep_until_written=True)
    await put(store, 4)
    await settled(store)
    disk.may_write.clear()
    more = chain(6)[4:]
    assert await store.put(more, [payload(name) for name in more], parent=key(3)) == 2
    assert store.host.num_pinned == 6
    room = asyncio.ensure_future(store.room())
    await asyncio.sleep(0.01)
    assert not room.done()
    disk.may_write.set()
    await room
    await settled(store)
    assert store.host.num_pinned == 0
    assert disk.keys() == chain(6)
    await store.close()


async def test_waiting_for_room_ends_when_the_disk_stalls_and_what_was_required_is_written_later() -> None:
    store, disk = await with_disk(8, 64, write_policy="write-through", keep_until_written=True)
    disk.may_write.clear()
    await put(store, 6)
    room = asyncio.ensure_future(store.room())
    await asyncio.sleep(0.01)
    assert not room.done()
    disk.is_stalled = True
    async with asyncio.timeout(60):
        await room
        await store.room()
        await settled(store)
    assert len(disk) == 0
    assert store.host.num_pinned == 0, "a write that failed keeps nothing pinned"
    disk.is_stalled = False
    disk.may_write.set()
    await put(store, 1, number=1)
    await settled(store)
    assert sorted(disk.keys()) == sorted(chain(6) + chain(1, 1))
    store.check_integrity()
    await store.close()


async def test_a_flush_ends_when_the_disk_stalls() -> None:
    store, disk = await with_disk(64, 64, queue_blocks=2)
    disk.may_write.clear()
    await put(store, 20)
    flush = asyncio.ensure_future(store.flush(60.0))
    await asyncio.sleep(0.01)
    assert not flush.done()
    disk.is_stalled = True
    async with asyncio.timeout(60):
        await flush
    assert store.match(chain(20)) == [Tier.HOST] * 20
    await store.close()


async def test_a_block_on_its_way_to_disk_is_still_there() -> None:
    heard = Listener()
    store, disk = await with_disk(8, 64, on_change=heard)
    disk.may_write.clear()
    await put(store, 8)
    assert store.stats.num_demoting == 2
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
    assert store.stats.num_demoting == 2
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


async def test_a_long_chain_on_its_way_to_disk_is_lost_with_the_block_before_it() -> None:
    heard = Listener()
    store, disk = await with_disk(4000, 4000, queue_blocks=2000, on_change=heard)
    await writes_under_way(store, disk)
    await put(store, 3000)
    num_left = len(store.host.match(chain(3000)))
    assert store.stats.num_demoting == 3000 - num_left > 900
    await store.remove([key(num_left - 1)])
    assert store.stats.num_demoting == 0
    held = chain(num_left - 1)
    assert heard.tiers.keys() - {key(0, number) for number in (1, 2, 3)} == set(held)
    assert store.match(chain(3000)) == [Tier.HOST] * len(held)
    disk.may_write.set()
    await settled(store)
    assert store.host.num_pinned == 0
    store.check_integrity()
    await store.close()


async def test_a_block_stored_again_while_it_is_written_gives_its_first_slot_back() -> None:
    store, disk = await with_disk(80, 200, watermark=0.1)
    await writes_under_way(store, disk)
    first, second = (store.reserve(chain(1)) for _ in range(2))
    for number, reservation in ((20, first), (40, second)):
        for span in reservation.spans:
            span[:] = payload(key(0))
        assert reservation.commit() == 1
        while key(0) in store.host:
            assert await put(store, 1, number) == 1
            number += 1
        assert key(0) in store.writes.evicted
    assert await get(store, 1) == [Tier.HOST]
    disk.may_write.set()
    await settled(store)
    assert store.host.num_pinned == 0
    assert await get(store, 1) == [Tier.SSD]
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


async def test_prefetch_reads_each_block_once_for_all_requests() -> None:
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


async def test_a_load_says_how_long_it_waited_for_the_disk() -> None:
    now_s = 0.0
    store, disk = await with_disk(16, 64, write_policy="write-through", clock=lambda: now_s)
    await put(store, 6)
    await settled(store)
    await put(store, 16, number=1)
    await settled(store)
    waited, spans = DiskWait(), [np.zeros(NBYTES, np.uint8) for _ in range(6)]
    disk.may_read.clear()
    reading = asyncio.create_task(store.get(chain(6), spans, waited))
    while not disk.num_reads:  # noqa: ASYNC110
        await asyncio.sleep(0)
    now_s = 3.0
    disk.may_read.set()
    assert await reading == [Tier.SSD] * 6
    assert waited.seconds == 3.0
    # From host memory it waits for no disk.
    assert await store.get(chain(6), spans, waited) == [Tier.HOST] * 6
    async with store.pinned(chain(6), waited):
        assert waited.seconds == 3.0
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


@pytest.mark.parametrize("remote", [False, True])
async def test_flush_writes_everything_also_what_only_the_pool_has(remote) -> None:
    pool = FakePool(loop=asyncio.get_running_loop() if remote else None)
    store, disk = await with_disk(64, 64, pool=pool)
    pool.store = store
    for i, name in enumerate(chain(3)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    await put(store, 20, number=1)
    await store.flush(60.0)
    assert sorted(disk.keys()) == sorted(chain(3) + chain(20, 1))
    await store.close()


async def test_a_write_that_continues_one_in_parts_is_not_refused(tmp_path: Path) -> None:
    layout = OpaqueLayout(1 << 20, bytes(16))
    ssd = await SsdTier.open(
        tmp_path, layout, capacity_nbytes=64 << 20, segment_nbytes=64 << 20, io_deadline_s=60.0
    )
    store = TieredStore(
        layout, StoreOptions(ssd=SsdTierOptions(queue_nbytes=64 << 20)), np.zeros(64 << 20, np.uint8), ssd=ssd
    )
    await store.start()
    keys = chain(40)
    assert await store.put(keys, [np.zeros(1 << 20, np.uint8)] * len(keys)) == len(keys)
    assert store.writes is not None
    # A batch is 16 blocks or one run longer: the first is two durable writes, the second is after both.
    for name in (*keys[:15], keys[30], keys[39]):
        assert store.writes.offer(name)
    await store.writes.drained()
    assert (len(ssd), ssd.stats.num_unparented) == (len(keys), 0)
    await store.close()


async def test_what_a_full_disk_evicts_is_held_no_more_nor_what_follows_it(tmp_path: Path) -> None:
    heard = Listener()
    ssd = await SsdTier.open(tmp_path, LAYOUT, capacity_nbytes=8 * PAGE_NBYTES, io_deadline_s=60.0)
    store = make(6, replace(LRU, write_policy="write-through"), ssd=ssd, on_change=heard)
    await store.start()
    for length, number in ((2, 0), (6, 1)):
        assert await put(store, length, number) == length
        await settled(store)
    assert len(ssd) == 8
    # In host memory is only the end of the chain that the disk evicts first.
    await store.prefetch([key(1)])
    assert store.match(chain(2)) == [Tier.SSD, Tier.HOST]
    for number, held in ((2, [Tier.SSD, Tier.HOST]), (3, [])):
        assert await put(store, 1, number) == 1
        await settled(store)
        assert [tier for name in chain(2) if (tier := store.tier_of(name)) is not None] == held
        assert heard.tiers == dict(store.blocks())
        store.check_integrity()
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
    assert [step async for step in store.verify()][-1] == (14, 14, [])
    store.host.bytes_of(store.host.slot_of(key(1)))[0] ^= 1
    disk.bytes[key(5)][0] ^= 1
    assert sorted([bad async for _, _, some in store.verify() for bad in some]) == [key(1), key(5)]
    store.check_integrity()
    await store.close()
