"""Room on a store node: what it has taken is there, and what is pinned stays."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.objects.shelf import ObjectShelf
from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.tiers.ssd import SsdTier
from moonpool.protos import store_pb2
from moonpool.runtime.config.options import HostTierOptions, StoreOptions
from moonpool.transfer import checksum

CHUNK = 64 << 10
OWNER = b"o" * 16
LAYOUT = OpaqueLayout(CHUNK, b"c" * 16)


@asynccontextmanager
async def shelf_of(
    num_chunks: int, *, ssd: SsdTier | None = None, tenant_nbytes: int = 0
) -> AsyncIterator[ObjectShelf]:
    """A shelf over ``num_chunks`` of memory, and over ``ssd``, which it closes."""
    shelf: ObjectShelf | None = None

    def changed(key: object, tier: object) -> None:
        assert shelf is not None
        shelf.inventory.chunk_changed(key, tier)

    options = StoreOptions(host=replace(HostTierOptions(), policy="lru"), write_policy="write-through")
    memory = np.zeros(num_chunks * CHUNK, np.uint8)
    store = TieredStore(LAYOUT, options, memory, ssd=ssd, on_change=changed, keep_until_written=True)
    shelf = ObjectShelf(
        *("a", store, CHUNK),
        catalogue=None,
        tenant_nbytes=tenant_nbytes,
        clock=lambda: 100.0,
        rng=random.Random(1),
    )
    await shelf.start()
    yield shelf
    shelf.check_integrity()
    await shelf.close()


async def put(shelf: ObjectShelf, number: int, num_chunks: int = 4) -> store_pb2.StoredObject:
    info = store_pb2.ObjectInfo(
        key=b"%016d" % number, storage=number + 1, name=f"{number}", nbytes=num_chunks * CHUNK
    )
    put_id, under_way = await shelf.begin(OWNER, info, 60.0)
    while under_way.offsets:
        under_way = await shelf.commit(put_id, [checksum(bytes(CHUNK))] * len(under_way.offsets))
    found = shelf.inventory.get(number + 1)
    assert found is not None
    return found


async def test_a_node_that_is_full_to_the_last_slot_of_its_disk_keeps_what_is_pinned(tmp_path: Path) -> None:
    num_chunks = 128
    ssd = await SsdTier.open(tmp_path, LAYOUT, capacity_nbytes=num_chunks * CHUNK, io_deadline_s=60.0)
    lost: list[str] = []
    async with shelf_of(16, ssd=ssd) as shelf:
        shelf.inventory.on_lost = lambda record, evicted: lost.append(record.info.name)
        pinned = await put(shelf, 0)
        shelf.name(pinned, store_pb2.ObjectRecord(version=1, pin=store_pb2.HARD, places=["a"], copies=1))
        for number in range(1, num_chunks // 4 + 2):
            await put(shelf, number)
        await shelf._store.flush(60.0)
        # Dropped to make room, whole and the oldest first.
        assert lost == [f"{number}" for number in range(1, len(lost) + 1)]
        assert shelf.inventory.is_whole(pinned)
