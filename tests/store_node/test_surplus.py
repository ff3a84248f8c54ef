"""Copies made for busy times go first when the times are not busy any more."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np

from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.objects.shelf import ObjectShelf
from moonpool.kvstore.store import TieredStore
from moonpool.protos import store_pb2
from moonpool.runtime.config.options import HostTierOptions, StoreOptions

CHUNK = 64 << 10
OWNER = b"o" * 16


async def put(shelf: ObjectShelf, name: str, *, surplus: bool = False) -> None:
    info = store_pb2.ObjectInfo(
        key=name.encode().ljust(16), storage=abs(hash(name)) | 1, name=name, nbytes=2 * CHUNK, surplus=surplus
    )
    put_id, under_way = await shelf.begin(OWNER, info, 5.0)
    await shelf.commit(put_id, [0] * len(under_way.offsets))


async def names_after(shelf: ObjectShelf, name: str) -> set[str]:
    await put(shelf, name)
    await asyncio.sleep(0)  # what was evicted is seen to be gone in the loop's next turn
    await shelf.inventory.settle()
    shelf.check_integrity()
    return {record.info.name for record in shelf.inventory}


async def test_cold_surplus_copies_go_before_what_is_older() -> None:
    now_s = 100.0
    options = StoreOptions(host=replace(HostTierOptions(), policy="lru"))
    shelf: ObjectShelf | None = None

    def changed(key: object, tier: object) -> None:
        assert shelf is not None
        shelf.inventory.chunk_changed(key, tier)

    store = TieredStore(
        OpaqueLayout(CHUNK, b"c" * 16), options, np.zeros(8 * CHUNK, np.uint8), on_change=changed
    )
    shelf = ObjectShelf("a", store, CHUNK, catalogue=None, clock=lambda: now_s, rng=random.Random(1))
    await shelf.start()
    await put(shelf, "old")
    await put(shelf, "hot copy", surplus=True)
    await put(shelf, "cold copy", surplus=True)
    await put(shelf, "new")
    now_s += 60.0
    (hot,) = shelf.inventory.of_key(OWNER, b"hot copy".ljust(16))
    opened = await shelf.leases.open(OWNER, store_pb2.OpenObject(storage=hot.info.storage), 5.0)
    assert opened is not None
    shelf.leases.release(opened.lease_ids)
    # Memory is full now. The unread copy is dropped, though it came after "old" ...
    assert await names_after(shelf, "one") == {"old", "hot copy", "new", "one"}
    # ... then what was unused for longest, as long as the other copy is read ...
    assert await names_after(shelf, "two") == {"hot copy", "new", "one", "two"}
    # ... and that one when it is not any more.
    now_s += 60.0
    assert await names_after(shelf, "three") == {"new", "one", "two", "three"}
    await shelf.close()
