"""Laws of the tier on disk while all is well."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.errors import LayoutError, SsdDirectoryInUse, SsdFormatMismatch, SsdUnusable, StoreError
from moonpool.kvstore.eviction import POLICIES
from moonpool.kvstore.tiers.ssd import SsdTier
from moonpool.kvstore.tiers.ssd.files.segments import CALL_NBYTES, Segments
from tests.kvstore.nodes import chain
from tests.kvstore.ssd_blocks import (
    LAYOUT,
    check_every_block,
    evict,
    get,
    match,
    open_tier,
    parents_of,
    payload,
    put_chain,
)


async def test_what_was_put_is_there_and_still_is_after_a_restart(tmp_path: Path) -> None:
    async with await open_tier(tmp_path) as tier:
        assert await put_chain(tier, chain(40)) == [True] * 40
        assert await check_every_block(tier) == 40
        assert len(match(tier, chain(50))) == 40
    async with await open_tier(tmp_path) as tier:
        assert tier.keys() == chain(40)
        assert [tier.parent_of(key) for key in chain(40)] == parents_of(chain(40))
        assert tier.stats.num_adopted == 40
        assert await check_every_block(tier) == 40


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_full_tier_evicts_from_the_ends_of_chains(tmp_path: Path, policy: str) -> None:
    dropped: list[BlockKey] = []
    tier = await open_tier(tmp_path, policy=policy)
    tier.on_dropped = lambda keys, reason: dropped.extend(keys)
    async with tier:
        for number in range(12):
            keys = chain(10, number)
            tier.use(keys)
            await put_chain(tier, keys)
        assert 40 <= await check_every_block(tier) <= 64
        held = sum(len(match(tier, chain(10, number))) for number in range(12))
        assert held == len(tier)
        assert not set(dropped) & set(tier.keys())
        assert tier.stats.num_evictions == len(dropped)
    async with await open_tier(tmp_path) as tier:
        await check_every_block(tier)


async def test_a_block_without_the_one_before_it_is_not_taken(tmp_path: Path) -> None:
    async with await open_tier(tmp_path) as tier:
        assert await put_chain(tier, chain(8)[4:], before=chain(8)[3]) == [False] * 4
        assert tier.stats.num_unparented == 4
        assert await put_chain(tier, chain(8)[:4]) == [True] * 4
        assert await put_chain(tier, chain(8)[4:], before=chain(8)[3]) == [True] * 4
        tier.check_integrity()


async def test_remove_takes_what_follows_along_for_good(tmp_path: Path) -> None:
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(10))
        assert await tier.remove(chain(10)[6:7]) == chain(10)[:5:-1]
    async with await open_tier(tmp_path) as tier:
        assert tier.keys() == chain(6)
        assert await evict(tier, 2) == [chain(6)[5], chain(6)[4]]
        assert await check_every_block(tier) == 4


async def test_pinned_blocks_stay(tmp_path: Path) -> None:
    async with await open_tier(tmp_path, slots=16) as tier:
        # One slot is kept free.
        assert all(await put_chain(tier, chain(15)))
        slots = match(tier, chain(15))
        tier._slot_map.cache.pin(slots)
        assert await put_chain(tier, chain(4, 1)) == [False] * 4
        assert tier.stats.num_refusals == 1  # the others are refused for want of the first
        tier._slot_map.cache.unpin(slots)
        assert await put_chain(tier, chain(4, 1)) == [True] * 4
        assert await check_every_block(tier) == 15


async def test_a_block_put_twice_at_once_is_written_once(tmp_path: Path) -> None:
    async with await open_tier(tmp_path) as tier:
        results = await asyncio.gather(*(put_chain(tier, chain(20)) for _ in range(4)))
        assert results == [[True] * 20] * 4
        assert tier.stats.num_stored == 20
        assert await check_every_block(tier) == 20


async def test_many_puts_and_gets_at_once(tmp_path: Path) -> None:
    async with await open_tier(tmp_path) as tier:

        async def put_and_get(number: int) -> None:
            for length in range(1, 8):
                await put_chain(tier, chain(length, number))
                for key, found in zip(
                    chain(length, number), await get(tier, chain(length, number)), strict=True
                ):
                    assert found is None or np.array_equal(found, payload(key))

        await asyncio.gather(*(put_and_get(number) for number in range(20)))
        assert tier.stats.num_corrupt == 0
        await check_every_block(tier)


async def test_a_put_that_is_cancelled_happened_or_did_not(tmp_path: Path) -> None:
    async with await open_tier(tmp_path) as tier:
        for number in range(12):
            task = asyncio.create_task(put_chain(tier, chain(4, number)))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await put_chain(tier, chain(4, 99))
        await check_every_block(tier)
    async with await open_tier(tmp_path) as tier:
        assert await check_every_block(tier) >= 4


async def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    async with await open_tier(tmp_path / "a") as tier:
        with pytest.raises(LayoutError, match="a block has 6000 bytes, got 5"):
            await tier.put(chain(1), [b"12345"], parents=[None])
        with pytest.raises(LayoutError):
            await tier.get(chain(1), [bytearray(7)])
        assert await tier.get(chain(1), [bytearray(6000)]) == [False]
    with pytest.raises(LayoutError, match="hold no block"):
        await SsdTier.open(tmp_path / "b", LAYOUT, capacity_nbytes=5000)
    with pytest.raises(StoreError, match="eviction policy"):
        await open_tier(tmp_path / "c", policy="magic")
    assert not (tmp_path / "c").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(SsdUnusable, match="file"):
        await open_tier(tmp_path / "file")


async def test_two_tiers_on_one_directory_are_refused(tmp_path: Path) -> None:
    async with await open_tier(tmp_path):
        with pytest.raises(SsdDirectoryInUse, match="process"):
            await open_tier(tmp_path)
    async with await open_tier(tmp_path):
        pass


@pytest.mark.parametrize("field", ["version", "checksum", "fingerprint", "block_nbytes"])
async def test_what_was_written_for_other_blocks_is_refused(tmp_path: Path, field: str) -> None:
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(8))
    other = {"version": 2, "checksum": "crc32", "fingerprint": "00" * 16, "block_nbytes": 6001}[field]
    path = tmp_path / "tier.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: other}))
    with pytest.raises(SsdFormatMismatch, match=field) as refusal:
        await open_tier(tmp_path)
    assert refusal.value.found == other


async def test_damaged_or_missing_format_is_refused(tmp_path: Path) -> None:
    async with await open_tier(tmp_path):
        pass
    (tmp_path / "tier.json").write_text("{")
    with pytest.raises(SsdFormatMismatch, match="damaged"):
        await open_tier(tmp_path)
    (tmp_path / "tier.json").unlink()
    with pytest.raises(SsdFormatMismatch, match=r"tier\.json"):
        await open_tier(tmp_path)


async def test_a_tier_may_become_smaller_or_larger(tmp_path: Path) -> None:
    async with await open_tier(tmp_path, slots=64) as tier:
        await put_chain(tier, chain(60))
    async with await open_tier(tmp_path, slots=24) as tier:
        assert await check_every_block(tier) == 24
        assert tier.stats.num_orphans + tier.stats.num_lost == 36
        assert not (tmp_path / "segment-00002.kv").exists()
    async with await open_tier(tmp_path, slots=64) as tier:
        assert await check_every_block(tier) == 24
        await put_chain(tier, chain(60)[24:], before=chain(24)[-1])
        assert await check_every_block(tier) == 60


async def test_blocks_larger_than_one_call_to_the_disk(tmp_path: Path) -> None:
    layout = OpaqueLayout(2 * CALL_NBYTES + 100, b"large-blocks-16b")
    blocks = [np.random.default_rng(i).integers(0, 256, layout.block_nbytes, np.uint8) for i in range(3)]
    keys = chain(3)
    into = [np.zeros(layout.block_nbytes, np.uint8) for _ in keys]
    async with await SsdTier.open(tmp_path, layout, capacity_nbytes=32 << 20, io_deadline_s=60.0) as tier:
        assert all(await tier.put(keys, blocks, parents=parents_of(keys)))
        assert await tier.get(keys, into) == [True] * 3
        assert [tier.checksum_of(key) for key in keys] == [xxh3_64_intdigest(block) for block in blocks]
    assert all(np.array_equal(block, found) for block, found in zip(blocks, into, strict=True))
    # One bit of the last byte of the last block.
    with (tmp_path / "segment-00000.kv").open("r+b") as file:
        file.seek(2 * (2 * CALL_NBYTES + 4096) + layout.block_nbytes - 1)
        file.write(bytes([blocks[2][-1] ^ 1]))
    into[2][:] = 7
    async with await SsdTier.open(tmp_path, layout, capacity_nbytes=32 << 20, io_deadline_s=60.0) as tier:
        assert await tier.get(keys, into) == [True, True, False]
    assert (into[2] == 7).all(), "a destination holds bytes that were not verified"


async def test_two_puts_of_one_chain_at_once(tmp_path: Path) -> None:
    async with await open_tier(tmp_path) as tier:
        parts = [chain(40)[at : at + 8] for at in range(0, 40, 8)]
        puts = [
            put_chain(tier, part, before=chain(40)[8 * i - 1] if i else None) for i, part in enumerate(parts)
        ]
        assert await asyncio.gather(*puts) == [[True] * 8] * 5
        assert await check_every_block(tier) == 40
    async with await open_tier(tmp_path) as tier:
        assert tier.keys() == chain(40)


async def test_a_record_written_anew_outlives_an_older_put_that_was_to_delete_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is evicted by a put that takes long, and put again, in its old slot, before that one ends."""
    may_write = threading.Event()
    answer = Segments.write

    def wait_first(segments: Segments, slot: int, buffer: memoryview, at: int = 0) -> None:
        if slot == held_up:
            may_write.wait()
        answer(segments, slot, buffer, at)

    monkeypatch.setattr(Segments, "write", wait_first)
    async with await open_tier(tmp_path, slots=64, threads=4) as tier:
        again = chain(1, 0)
        for number in range(60):
            held_up = -1
            assert await put_chain(tier, chain(1, number)) == [True]
        slot = tier._slot_map.cache.slot_of(again[0])
        held_up = 60  # of the spare slots the one that is free for longest
        slow = asyncio.create_task(put_chain(tier, chain(1, 99)))
        while again[0] in tier:  # noqa: ASYNC110 - a tier tells its state, not when it changes
            await asyncio.sleep(0)
        for number in range(100, 103):
            assert await put_chain(tier, chain(1, number)) == [True]
        assert await put_chain(tier, again) == [True]
        assert tier._slot_map.cache.slot_of(again[0]) == slot
        may_write.set()
        assert await slow == [True]
    async with await open_tier(tmp_path) as tier:
        assert again[0] in tier
        await check_every_block(tier)
