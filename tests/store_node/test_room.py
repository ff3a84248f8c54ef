"""Room on a store node: what it has taken is there, and what is pinned stays."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.objects.errors import PutBroken, PutUnknown, StoreFull
from moonpool.kvstore.objects.put import Put
from moonpool.kvstore.objects.shelf import ObjectShelf
from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.tiers.ssd import SsdTier
from moonpool.kvstore.tiers.ssd.files.segments import Segments
from moonpool.protos import store_pb2
from moonpool.runtime.config.options import HostTierOptions, StoreOptions
from moonpool.runtime.service.vital import cancel_and_wait
from moonpool.transfer import checksum

CHUNK = 64 << 10
OWNER = b"o" * 16
LAYOUT = OpaqueLayout(CHUNK, b"c" * 16)


@asynccontextmanager
async def shelf_of(
    num_chunks: int,
    *,
    ssd: SsdTier | None = None,
    tenant_nbytes: int = 0,
    clock: Callable[[], float] = time.monotonic,
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
        clock=clock,
        rng=random.Random(1),
    )
    await shelf.start()
    yield shelf
    shelf.check_integrity()
    await shelf.close()


def info_of(number: int, num_chunks: int = 4, *, surplus: bool = False) -> store_pb2.ObjectInfo:
    return store_pb2.ObjectInfo(
        key=b"%016d" % number,
        storage=number + 1,
        name=f"{number}",
        nbytes=num_chunks * CHUNK,
        surplus=surplus,
    )


async def write(shelf: ObjectShelf, put_id: int, under_way: Put) -> Put:
    return await shelf.commit(put_id, [checksum(bytes(CHUNK))] * len(under_way.offsets))


async def put(
    shelf: ObjectShelf, number: int, num_chunks: int = 4, *, surplus: bool = False
) -> store_pb2.StoredObject:
    put_id, under_way = await shelf.begin(OWNER, info_of(number, num_chunks, surplus=surplus), 60.0)
    while under_way.offsets:
        under_way = await write(shelf, put_id, under_way)
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


def grow_once(segments: Segments, grow: Callable[[Segments], None] = Segments.grow) -> None:
    """The filesystem has room for one segment."""
    if segments.num_segments:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    grow(segments)


async def test_a_filesystem_that_has_room_again_is_asked_also_for_a_large_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    sizes = {"capacity_nbytes": 256 * CHUNK, "segment_nbytes": 64 * CHUNK}
    ssd = await SsdTier.open(tmp_path, LAYOUT, **sizes, io_deadline_s=60.0, clock=lambda: now_s)
    async with shelf_of(72, ssd=ssd) as shelf:
        with monkeypatch.context() as full:
            full.setattr(Segments, "grow", grow_once)
            for number in range(20):
                await put(shelf, number)
            with pytest.raises(StoreFull):
                await put(shelf, 20, num_chunks=80)
        now_s += 60.0
        await put(shelf, 20, num_chunks=80)


async def test_a_node_whose_filesystem_is_full_keeps_what_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_chunks, now_s = 128, 0.0
    ssd = await SsdTier.open(
        tmp_path,
        LAYOUT,
        capacity_nbytes=num_chunks * CHUNK,
        segment_nbytes=num_chunks // 2 * CHUNK,
        io_deadline_s=60.0,
        clock=lambda: now_s,
    )
    most_chunks = ssd.capacity
    lost: list[str] = []
    async with shelf_of(16, ssd=ssd) as shelf:
        shelf.inventory.on_lost = lambda record, evicted: lost.append(record.info.name)
        with monkeypatch.context() as full:
            full.setattr(Segments, "grow", grow_once)
            pinned = await put(shelf, 0)
            shelf.name(pinned, store_pb2.ObjectRecord(version=1, pin=store_pb2.HARD, places=["a"], copies=1))
            for number in range(1, 20):
                await put(shelf, number)
            await shelf._store.flush(60.0)
            # Dropped to make room, whole and the oldest first.
            num_kept = (most_chunks - num_chunks // 2) // 4
            assert lost == [f"{number}" for number in range(1, 21 - num_kept)]
            assert shelf.inventory.is_whole(pinned)
        # Another segment is made when the filesystem may have room again.
        now_s += 60.0
        await put(shelf, 20)
        assert ssd.capacity == most_chunks
        assert shelf.inventory.is_whole(pinned)
        assert len(lost) == 20 - num_kept


async def test_a_put_that_finds_no_room_beside_pinned_objects_drops_none() -> None:
    async with shelf_of(16) as shelf:
        for number in range(3):
            named = store_pb2.ObjectRecord(version=1, pin=store_pb2.HARD, places=["a"], copies=1)
            shelf.name(await put(shelf, number), named)
        await put(shelf, 3, surplus=True)
        with pytest.raises(StoreFull):
            await put(shelf, 4, num_chunks=8)
        assert len(list(shelf.inventory)) == 4


async def test_removals_outlast_a_put_that_waits_for_them_and_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()
    async with shelf_of(16) as shelf:
        remove = shelf._store.remove

        async def slow(keys: Sequence[BlockKey]) -> None:
            await gate.wait()
            await remove(keys)

        monkeypatch.setattr(shelf._store, "remove", slow)
        shelf.inventory.drop(await put(shelf, 0))
        first, second = (asyncio.create_task(shelf.inventory.settle()) for _ in range(2))
        await asyncio.sleep(0)
        await cancel_and_wait(first)
        gate.set()
        await asyncio.wait_for(second, 60)
        assert not list(shelf._store.blocks())


async def test_puts_at_once_count_together() -> None:
    """Each waits until the disk has dropped what makes room for it."""
    async with shelf_of(16, tenant_nbytes=8 * CHUNK) as shelf:
        for number in range(2):
            await put(shelf, number)
        await asyncio.gather(*(put(shelf, number) for number in range(2, 6)), return_exceptions=True)
        held = list(shelf.inventory)
        assert sum(map(shelf.inventory.taken_nbytes, held)) <= 8 * CHUNK
        assert len(held) == 2


async def test_puts_at_once_make_room_of_the_same_surplus_copies() -> None:
    now_s = 100.0
    async with shelf_of(16, clock=lambda: now_s) as shelf:
        for number in range(4):
            await put(shelf, number, surplus=True)
        now_s += 60.0
        await asyncio.gather(*(put(shelf, number) for number in range(4, 8)))
        assert sorted(record.info.name for record in shelf.inventory) == ["4", "5", "6", "7"]


async def test_a_second_put_of_the_same_bytes_leaves_the_first_alone() -> None:
    async with shelf_of(16) as shelf:
        first, under_way = await shelf.begin(OWNER, info_of(0), 60.0)
        second = 0
        with suppress(PutBroken):
            second, _ = await shelf.begin(OWNER, info_of(0), 60.0)
        await write(shelf, first, under_way)
        shelf.abort(second)
        await shelf.inventory.settle()
        await asyncio.sleep(0)  # what was removed is seen to be gone in the loop's next turn
        (held,) = shelf.inventory
        assert shelf.inventory.is_whole(held)


async def test_a_put_may_follow_at_once_on_an_aborted_one_of_the_same_bytes() -> None:
    async with shelf_of(16) as shelf:
        put_id, under_way = await shelf.begin(OWNER, info_of(0, 8), 60.0)
        await write(shelf, put_id, under_way)
        shelf.abort(put_id)
        # The chunks that it had written are still being removed.
        held = await put(shelf, 0, 8)
        await shelf.inventory.settle()
        assert shelf.inventory.is_whole(held)


async def test_a_put_that_lapses_while_it_waits_for_room_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shelf_of(16) as shelf:
        put_id, under_way = await shelf.begin(OWNER, info_of(0, 8), 60.0)

        async def lapses() -> None:
            shelf.abort(put_id)
            await shelf.inventory.settle()

        monkeypatch.setattr(shelf._store, "room", lapses)
        with pytest.raises(PutUnknown):
            await write(shelf, put_id, under_way)
