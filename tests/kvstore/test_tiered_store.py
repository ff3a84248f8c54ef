"""Laws of the store over host memory and a pool above it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import BlockCorrupt, BlockMissing
from moonpool.runtime.errors import MoonpoolError
from tests.kvstore.fake_pool import FakePool
from tests.kvstore.nodes import chain, key
from tests.kvstore.small_store import (
    NBYTES,
    Listener,
    get,
    make,
    payload,
    put,
)


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


async def test_a_put_with_a_wrong_checksum_stores_nothing() -> None:
    store = make(8)
    with pytest.raises(BlockCorrupt):
        await store.put([key(0)], [payload(key(0))], checksums=[1])
    assert store.match([key(0)]) == []
    assert store.host.num_free == 8
    store.check_integrity()


async def test_a_block_is_not_visible_before_it_is_complete() -> None:
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


@pytest.mark.parametrize("remote", [False, True])
async def test_the_pool_s_blocks_go_to_host_memory(remote) -> None:
    heard, pool = Listener(), FakePool(loop=asyncio.get_running_loop() if remote else None)
    store = pool.store = make(8, pool=pool, on_change=heard)
    for i, name in enumerate(chain(4)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    assert store.match(chain(5)) == [Tier.POOL] * 4
    pool.evict(key(0))
    pool.evict(key(0))
    assert store.match(chain(5)) == [Tier.POOL, Tier.POOL, Tier.HOST, Tier.HOST]
    assert heard.tiers == {key(2): Tier.HOST, key(3): Tier.HOST}
    await store.copied()
    assert await get(store, 4) == [Tier.POOL, Tier.POOL, Tier.HOST, Tier.HOST]
    lease = await store.pin(chain(4), 1.0)
    assert [block.tier for block in lease.blocks] == [Tier.POOL, Tier.POOL, Tier.HOST, Tier.HOST]
    assert pool.num_holds == 2
    assert not pool.evict(key(0))
    store.release(lease.id)
    assert pool.num_holds == 0
    store.check_integrity()
    await store.close()


async def test_a_pool_out_of_reach_loses_what_it_drops_and_holds_nothing() -> None:
    heard, pool = Listener(), FakePool(loop=asyncio.get_running_loop())
    store = pool.store = make(8, pool=pool, on_change=heard)
    for i, name in enumerate(chain(4)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    pool.failing = MoonpoolError("a rank is gone")
    pool.evict(key(0))
    pool.evict(key(0))
    await store.copied()
    assert store.match(chain(4)) == [Tier.POOL] * 2
    assert heard.tiers.keys() == set()
    for ask in (store.pin(chain(4), 1.0), get(store, 2)):
        with pytest.raises(MoonpoolError, match="a rank is gone"):
            await ask
    assert pool.num_holds == 0
    store.check_integrity()
    await store.close()


async def test_what_the_pool_drops_as_surplus_is_kept_nowhere() -> None:
    heard, pool = Listener(), FakePool()
    store = pool.store = make(8, pool=pool, on_change=heard)
    for i, name in enumerate(chain(2)):
        pool.seal(name, key(i - 1) if i else None, payload(name))
    store.demote(key(1), key(0), pool.block_of(key(1)), surplus=True)
    assert len(store.host) == 0
    store.demote(key(1), key(0), pool.block_of(key(1)))
    assert len(store.host) == 1


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
