"""Blocks that leave the pool are copied to host memory without holding up the event loop."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.store import Bytes, TieredStore
from moonpool.kvstore.tiers.ssd import SsdTier
from moonpool.kvstore.tiers.ssd.files.segments import Segments
from moonpool.runtime.config.options import HostTierOptions, StoreOptions
from tests.kvstore.fake_pool import FakePool
from tests.kvstore.nodes import chain
from tests.kvstore.small_store import Listener

MIB = 1 << 20
LAYOUT = OpaqueLayout(MIB, b"demotion-16-byte")
LRU = StoreOptions(host=HostTierOptions(policy="lru"))
POOL = np.random.default_rng(0).integers(0, 256, (64, MIB), np.uint8)


def make(num_slots: int, **kwargs: Any) -> TieredStore:
    memory = np.full(num_slots * MIB, 1, np.uint8)  # as a node's: every page is there
    return TieredStore(LAYOUT, LRU, memory, pool=FakePool(POOL), **kwargs)


def drop(store: TieredStore, keys: list[BlockKey]) -> None:
    """The pool drops a chain, its end first; block i of the chain lies in place i of the pool."""
    for i in reversed(range(len(keys))):
        store.demote(keys[i], keys[i - 1] if i else None, i)


async def test_blocks_are_found_while_they_are_copied_and_after() -> None:
    store, keys = make(64), chain(24)
    drop(store, keys)
    assert store.demoter.demoting
    assert store.match(keys) == [Tier.HOST] * 24
    assert dict(store.blocks()) == dict.fromkeys(keys, Tier.HOST)
    spans = [np.zeros(MIB, np.uint8) for _ in keys]
    assert await store.get(keys, spans) == [Tier.HOST] * 24
    assert all(np.array_equal(POOL[i], span) for i, span in enumerate(spans))
    await store.copied()
    assert not store.demoter.demoting
    store.check_integrity()
    await store.close()


async def test_a_block_removed_while_it_is_copied_is_gone() -> None:
    changes: dict[BlockKey, Tier | None] = {}
    store, keys = make(64, on_change=changes.__setitem__), chain(24)
    drop(store, keys)
    await store.remove(keys[10:11])
    assert store.match(keys) == [Tier.HOST] * 10
    await store.copied()
    assert store.match(keys) == [Tier.HOST] * 10
    assert {key for key, tier in changes.items() if tier is not None} == set(keys[:10])
    assert store.host.num_free == 54
    store.check_integrity()
    await store.close()


async def test_of_more_than_there_is_room_for_the_beginnings_are_kept() -> None:
    changes: dict[BlockKey, Tier | None] = {}
    store, keys = make(16, on_change=changes.__setitem__), chain(64)
    drop(store, keys)
    await store.copied()
    num_held = len(store.match(keys))
    assert num_held >= 8, "the ends of chains pushed out their beginnings"
    assert {key for key, tier in changes.items() if tier is not None} == set(keys[:num_held])
    assert len(store.host) == num_held
    store.check_integrity()
    await store.close()


async def test_a_long_chain_that_is_copied_is_gone_with_the_block_before_it() -> None:
    layout, keys = OpaqueLayout(4 << 10, b"demotion-16-byte"), chain(1500)
    pool = FakePool(np.zeros((len(keys), layout.block_nbytes), np.uint8))
    heard = Listener()
    memory = np.zeros(4000 * layout.block_nbytes, np.uint8)
    store = TieredStore(layout, LRU, memory, pool=pool, on_change=heard)
    drop(store, keys)
    assert len(store.demoter.demoting) > 1000
    assert heard.tiers.keys() == set(keys)
    await store.remove(keys[:1])
    assert heard.tiers == {}
    assert dict(store.blocks()) == {}
    await store.copied()
    assert store.host.num_free == 4000
    store.check_integrity()
    await store.close()


class _CountedKey(bytes):
    """A key that knows how often one like it was compared with another object."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        _CountedKey.num_compared += 1
        return super().__eq__(other)

    __hash__ = bytes.__hash__


async def test_to_drop_a_block_costs_the_same_however_many_are_dropped_at_once() -> None:
    """Each evicts another; its descendants are looked up among the blocks being copied."""
    layout, num_blocks = OpaqueLayout(64 << 10, b"demotion-16-byte"), 512
    pool = FakePool(np.zeros((num_blocks, layout.block_nbytes), np.uint8))
    store = TieredStore(layout, LRU, np.ones(2 * num_blocks * layout.block_nbytes, np.uint8), pool=pool)
    for number in range(3):
        _CountedKey.num_compared = 0
        drop(store, [BlockKey(_CountedKey(key)) for key in chain(num_blocks, number)])
        num_compared = _CountedKey.num_compared
        await store.copied()
    assert store.host.num_free == 0
    assert num_compared < 8 * num_blocks
    store.check_integrity()
    await store.close()


class _WatchedPool(FakePool):
    """Knows how many bytes it has copied out on the thread that made it, which is the loop's."""

    def __init__(self) -> None:
        super().__init__(POOL)
        self.thread = threading.get_ident()
        self.nbytes_on_loop = 0

    def copy_out(self, blocks: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        if threading.get_ident() == self.thread:
            self.nbytes_on_loop += sum(destination.nbytes for destination in destinations)
        return super().copy_out(blocks, destinations)


def seconds_to_copy() -> float:
    """Of this thread, for the 64 MiB of the pool with their checksums: the least of three."""
    pool, into = FakePool(POOL), list(np.ones_like(POOL))
    times_s = []
    for _ in range(3):
        began_s = time.thread_time()
        pool.copy_out(range(64), into)
        times_s.append(time.thread_time() - began_s)
    return min(times_s)


async def test_the_loop_goes_on_while_a_gibibyte_is_evicted_and_the_disk_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 times 64 MiB at once, from the pool to full host memory, over a disk with writes that hang."""
    answers = threading.Event()
    monkeypatch.setattr(Segments, "write", lambda *_, **__: answers.wait())
    disk = await SsdTier.open(tmp_path, LAYOUT, capacity_nbytes=64 * MIB, io_deadline_s=0.05)
    pool = _WatchedPool()
    store = TieredStore(LAYOUT, LRU, np.full(128 * MIB, 1, np.uint8), pool=pool, ssd=disk)
    await store.start()
    turns: list[tuple[float, int]] = []  # of the loop: seconds of its thread, and bytes copied on it
    ended = False

    async def watch() -> None:
        while not ended:
            began_s, began_nbytes = time.thread_time(), pool.nbytes_on_loop
            await asyncio.sleep(0)
            turns.append((time.thread_time() - began_s, pool.nbytes_on_loop - began_nbytes))

    chains = [chain(64, number) for number in range(16)]
    gc.collect()
    gc.freeze()  # as a node does: what the tests have loaded is not looked through meanwhile
    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    num_held = 0
    longest_s: list[float] = []  # the longest turn of each time
    longest_nbytes = 0
    for keys in chains:
        turns.clear()
        drop(store, keys)
        await store.copied()  # as the engine, before it writes to those blocks
        await asyncio.sleep(0)
        longest_s.append(max(seconds for seconds, _ in turns))
        longest_nbytes = max(longest_nbytes, *(nbytes for _, nbytes in turns))
        num_held += len(store.match(keys))
    ended = True
    await watching
    assert num_held == 16 * 64, "host memory did not take what the pool dropped"
    assert longest_nbytes <= MIB, "the loop has copied more than the one block it may copy in a turn"
    # What else it does in a turn is Python of its own for 64 blocks: far less than to copy them, anywhere.
    # The median, because some virtual machines count what others do as this thread's time.
    typical_s, copy_s = statistics.median(longest_s), seconds_to_copy()
    print(f"longest turn of the loop: {typical_s * 1e3:.1f} ms; the copying: {copy_s * 1e3:.1f} ms")
    assert typical_s < 0.75 * copy_s
    async with asyncio.timeout(60):
        # It is called so when a write has hung for its deadline, which may be after all this.
        while not disk.is_stalled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert disk.stats.num_stalls >= 1
    rng = random.Random(1)
    keys = chain(64, 15)
    i = rng.randrange(64)
    into = np.zeros(MIB, np.uint8)
    await store.get(keys[: i + 1], [np.zeros(MIB, np.uint8)] * i + [into])
    assert np.array_equal(into, POOL[i])
    answers.set()
    await store.close()
