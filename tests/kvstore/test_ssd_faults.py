"""What becomes of a disk in trouble: counted, logged with file and offset, a miss; the rest works."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from moonpool.kvstore.tiers.ssd import SsdTier
from moonpool.kvstore.tiers.ssd.files.block_index import BlockIndex, IndexWriteFailed
from moonpool.kvstore.tiers.ssd.files.segments import Segments
from moonpool.kvstore.tiers.ssd.jobs.batch import Batch
from tests.kvstore.nodes import chain
from tests.kvstore.ssd_blocks import (
    LAYOUT,
    SLOT_NBYTES,
    check_every_block,
    get,
    open_tier,
    payload,
    put_chain,
)
from tests.small_disk import mounted

# After so long a disk hangs.
DEADLINE_S = 1.0


def flip_a_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


async def held(tier: SsdTier, length: int, number: int = 0) -> int:
    """How many of a chain's blocks can be had."""
    return sum(block is not None for block in await get(tier, chain(length, number)))


def counted_failures() -> float:
    labels = {"class": "store", "cause": "error"}
    return REGISTRY.get_sample_value("moonpool_failures_total", labels) or 0.0


async def test_a_flipped_bit_is_a_miss_for_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dropped = []
    async with await open_tier(tmp_path) as tier:
        tier.on_dropped = lambda keys, reason: dropped.append((list(keys), reason))
        await put_chain(tier, chain(10))
        await put_chain(tier, chain(10, 1))
        slot = tier._slot_map.cache.slot_of(chain(10)[6])
        assert slot == 6
        flip_a_bit(tmp_path / "segment-00000.kv", 6 * SLOT_NBYTES + 123)
        into = [np.full(LAYOUT.block_nbytes, 7, np.uint8) for _ in range(10)]
        assert await tier.get(chain(10), into) == [True] * 6 + [False] + [True] * 3
        assert (into[6] == 7).all(), "a destination holds bytes that were not verified"
        assert dropped == [(chain(10)[:5:-1], "corrupt")]
        assert tier.stats.num_corrupt == 1
        assert re.search(r"segment-00000\.kv at 49152: the bytes of block", caplog.text)
        assert await held(tier, 10, 1) == 10
    async with await open_tier(tmp_path) as tier:
        assert await check_every_block(tier) == 16
        assert await put_chain(tier, chain(10)) == [True] * 10
        assert await check_every_block(tier) == 20


async def test_a_bit_flipped_while_the_tier_was_closed(tmp_path: Path) -> None:
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(10))
    flip_a_bit(tmp_path / "segment-00000.kv", 3 * SLOT_NBYTES)
    async with await open_tier(tmp_path) as tier:
        assert await tier.verify(chain(10)) == [True] * 3 + [False] + [True] * 6
        assert await check_every_block(tier) == 3


async def test_a_truncated_segment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(40))
        os.truncate(tmp_path / "segment-00001.kv", 4 * SLOT_NBYTES)
        assert await held(tier, 40) == 20 + 8  # those after the first lost one were read with it
        assert re.search(r"segment-00001\.kv at 32768: block \w+ cannot be read", caplog.text)
        assert await check_every_block(tier) == 20
        assert await put_chain(tier, chain(40)[20:], before=chain(40)[19]) == [True] * 20
        assert await check_every_block(tier) == 40
    os.truncate(tmp_path / "segment-00002.kv", 0)
    os.unlink(tmp_path / "segment-00001.kv")
    async with await open_tier(tmp_path) as tier:
        assert tier.stats.num_lost >= 16
        assert "segment-00001.kv ended at 0 bytes" in caplog.text
        before = await check_every_block(tier)
        assert before >= 16
        assert await put_chain(tier, chain(40)) == [True] * 40
        assert await check_every_block(tier) == 40


GARBAGE = {
    "the whole file": lambda data: os.urandom(len(data)),
    "all but the first pages": lambda data: data[:8192] + os.urandom(len(data) - 8192),
    "one page": lambda data: data[:8192] + os.urandom(4096) + data[12288:],
    "zeros": lambda data: bytes(len(data)),
    "half of it": lambda data: data[: len(data) // 2],
    "a few bytes": lambda data: b"hello",
    "nothing": lambda data: b"",
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", GARBAGE)
async def test_a_damaged_index_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    async with await open_tier(tmp_path) as tier:
        for number in range(4):
            await put_chain(tier, chain(15, number))
    index = tmp_path / "index" / "data.mdb"
    data = index.read_bytes()
    used = len(data) if damage == "the whole file" else 48 << 10
    index.write_bytes(GARBAGE[damage](data[:used]))
    async with await open_tier(tmp_path) as tier:
        # Pages that are no longer in use may be garbage; then nothing is lost.
        if len(tier) == 0 and damage != "nothing":
            assert "starts empty" in caplog.text
            assert (tmp_path / "set-aside-0" / "index" / "data.mdb").exists()
        await check_every_block(tier)
        for number in range(4):
            assert await put_chain(tier, chain(15, number)) == [True] * 15
    async with await open_tier(tmp_path) as tier:
        assert await check_every_block(tier) == 60


async def test_a_missing_index_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(15))
    (tmp_path / "index" / "data.mdb").unlink()
    async with await open_tier(tmp_path) as tier:
        assert len(tier) == 0
        assert "is missing" in caplog.text
        assert await put_chain(tier, chain(15)) == [True] * 15


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path, "4m") as folder:
        yield folder


async def test_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is room for about a hundred blocks where a thousand were to go."""
    async with await open_tier(small_disk, slots=1000) as tier:
        for number in range(40):
            await put_chain(tier, chain(10, number))
        assert tier.stats.num_no_space >= 1
        assert "no room for another segment" in caplog.text
        assert tier.stats.num_evictions > 100
        # What came last is there, although the disk is full.
        assert await held(tier, 10, 39) == 10
        assert await tier.remove(chain(10, 39)[5:6]) == chain(10, 39)[:4:-1]
        num_held = await check_every_block(tier)
        assert num_held >= 50
    async with await open_tier(small_disk, slots=1000) as tier:
        assert await check_every_block(tier) == num_held


async def test_a_disk_that_was_full_is_used_again_when_it_has_room(small_disk: Path) -> None:
    now = [0.0]
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(13 << 17))
    async with await open_tier(small_disk, slots=200, clock=lambda: now[0]) as tier:
        for number in range(8):
            await put_chain(tier, chain(10, number))
        full = len(tier)
        assert tier.stats.num_no_space == 1
        assert full <= tier.capacity < 100
        ballast.unlink()
        now[0] += 60
        for number in range(8):
            await put_chain(tier, chain(10, number))
        assert await check_every_block(tier) > full


async def test_a_read_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel's own EIO: the descriptor of a segment becomes that of a file that cannot be read there."""
    async with await open_tier(tmp_path, slots=48) as tier:
        await put_chain(tier, chain(40))
        before, capacity = counted_failures(), tier.capacity
        victim = tier._disk.segments._fds[1]
        unreadable = os.open("/proc/self/mem", os.O_RDWR)
        kept = os.dup(victim)
        os.dup2(unreadable, victim)
        os.close(unreadable)
        assert await held(tier, 40) == 16 + 8
        assert re.search(
            r"segment-00001\.kv at 0: block \w+ cannot be read: .*Input/output error", caplog.text
        )
        assert counted_failures() - before == tier.stats.num_read_errors >= 1
        assert tier.capacity == capacity - tier.stats.num_read_errors  # without the bad slots
        assert await check_every_block(tier) == 16
        # Writing there fails as well; the other segments take the blocks that fit.
        await put_chain(tier, chain(30, 1))
        assert tier.stats.num_write_errors >= 1
        assert counted_failures() - before == tier.stats.num_read_errors + tier.stats.num_write_errors
        await check_every_block(tier)
        os.dup2(kept, victim)
        os.close(kept)
    async with await open_tier(tmp_path, slots=48) as tier:
        await check_every_block(tier)


async def test_an_index_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(6))
        with monkeypatch.context() as broken:
            broken.setattr(BlockIndex, "apply", fail)
            before = counted_failures()
            assert await put_chain(tier, chain(6, 1)) == [False] * 6
            assert counted_failures() - before == tier.stats.num_write_errors == 1
            assert await check_every_block(tier) == 6
        assert await put_chain(tier, chain(6, 1)) == [True] * 6
        assert await check_every_block(tier) == 12
    async with await open_tier(tmp_path) as tier:
        assert await check_every_block(tier) == 12


async def test_a_segment_that_could_not_be_recorded_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    async with await open_tier(tmp_path, clock=lambda: now[0]) as tier:
        await put_chain(tier, chain(12))
        with monkeypatch.context() as broken:
            broken.setattr(BlockIndex, "apply", fail)
            await put_chain(tier, chain(12, 1))
            assert tier.stats.num_no_space == 1
        now[0] += 60
        assert await put_chain(tier, chain(40, 2)) == [True] * 40
        held = await check_every_block(tier)
    async with await open_tier(tmp_path) as tier:
        assert await check_every_block(tier) >= held >= 40


def fail(index: BlockIndex, **changes: object) -> None:
    raise IndexWriteFailed(index.path, "injected")


class Stall:
    """The disk does not answer while this is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.opened = threading.Event()
        self.opened.set()
        answer = getattr(Segments, name)

        def wait_first(segments: Segments, slot: int, buffer: memoryview, at: int = 0) -> None:
            self.opened.wait()
            answer(segments, slot, buffer, at)

        monkeypatch.setattr(Segments, name, wait_first)


def at_once(call: Coroutine[Any, Any, list[bool]]) -> list[bool]:
    """What it returns without waiting for anything."""
    with pytest.raises(StopIteration) as caught:
        call.send(None)
    answer: list[bool] = caught.value.value
    return answer


async def answers(tier: SsdTier) -> None:
    """Wait until it does. From then on no disk that others keep busy is taken for one that hangs."""
    while tier.is_stalled:  # noqa: ASYNC110 - a tier tells its state, not when it changes
        await asyncio.sleep(0.01)
    tier._disk._deadline_s = 60.0


async def test_a_stalled_read_is_a_miss_and_lands_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stall = Stall(monkeypatch, "read")
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(10))
    async with await open_tier(tmp_path, io_deadline_s=DEADLINE_S) as tier:
        stall.opened.clear()
        into = [np.full(LAYOUT.block_nbytes, 7, np.uint8) for _ in range(10)]
        assert await tier.get(chain(10), into) == [False] * 10
        assert tier.is_stalled and tier.stats.num_stalls == 1
        assert re.search(r"no answer for \d\.\d s \(reading .*segment-00000\.kv at 0\)", caplog.text)
        # Nobody waits while it lasts.
        assert at_once(tier.get(chain(10), into)) == [False] * 10
        assert at_once(put_chain(tier, chain(3, 1))) == [False] * 3
        assert len(tier) == 10, "a stall is no reason to drop blocks"
        stall.opened.set()
        await answers(tier)
        assert all((block == 7).all() for block in into), "a late read was delivered"
        assert "answers again" in caplog.text
        assert await held(tier, 10) == 10
    async with await open_tier(tmp_path) as tier:
        assert await check_every_block(tier) == 10


async def test_a_stalled_write_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stall = Stall(monkeypatch, "write")
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(10))
    async with await open_tier(tmp_path, io_deadline_s=DEADLINE_S) as tier:
        stall.opened.clear()
        sources = [payload(key).copy() for key in chain(5, 1)]
        parents = [None, *chain(4, 1)]
        assert await tier.put(chain(5, 1), sources, parents=parents) == [False] * 5
        for source in sources:
            source[:] = 0  # the caller's again
        stall.opened.set()
        await answers(tier)
        assert tier.keys() == chain(10)
        assert await put_chain(tier, chain(5, 1)) == [True] * 5
    async with await open_tier(tmp_path) as tier:
        assert await check_every_block(tier) == 15


async def test_what_was_given_up_in_a_stalled_sync_is_not_held_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put has answered that its blocks are not stored."""
    opened, sync = threading.Event(), Segments.sync

    def wait_first(segments: Segments, slots: Iterable[int]) -> None:
        opened.wait()
        sync(segments, slots)

    async with await open_tier(tmp_path, io_deadline_s=DEADLINE_S) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(Segments, "sync", wait_first)
            assert await put_chain(tier, chain(5)) == [False] * 5
            opened.set()
            while tier._being_written:  # noqa: ASYNC110 - a tier does not tell
                await asyncio.sleep(0.01)
        assert tier.keys() == []
        tier.check_integrity()
        await answers(tier)
        assert await put_chain(tier, chain(5, 1)) == [True] * 5
    async with await open_tier(tmp_path) as tier:
        assert await check_every_block(tier) >= 5


async def test_a_put_that_waits_for_another_of_the_same_block_ends_when_the_disk_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = Stall(monkeypatch, "write")
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(1, 1))  # makes the first segment, which takes a busy disk a while
    tier = await open_tier(tmp_path, io_deadline_s=0.2)
    stall.opened.clear()
    try:
        async with asyncio.timeout(60):
            puts = (put_chain(tier, chain(3)), put_chain(tier, chain(5)), put_chain(tier, chain(3)))
            assert await asyncio.gather(*puts) == [[False] * 3, [False] * 5, [False] * 3]
        assert tier.stats.num_given_up == 3 + 5
    finally:
        stall.opened.set()
    await answers(tier)
    assert await put_chain(tier, chain(5)) == [True] * 5
    assert await check_every_block(tier) == 6
    await tier.close()


async def test_a_caller_that_leaves_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = Stall(monkeypatch, "read")
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(4))
        stall.opened.clear()
        into = [np.full(LAYOUT.block_nbytes, 7, np.uint8) for _ in range(4)]
        reading = asyncio.create_task(tier.get(chain(4), into))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        stall.opened.set()
        assert await check_every_block(tier) == 4
        assert all((block == 7).all() for block in into)


async def test_a_caller_that_is_cancelled_twice_is_not_written_to_after_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, may_copy = threading.Event(), threading.Event()
    batches: list[Batch] = []
    begin = Batch.begin_touching

    def begin_slowly(batch: Batch) -> bool:
        begun = begin(batch)
        batches.append(batch)
        copying.set()
        may_copy.wait()
        return begun

    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(1))
        monkeypatch.setattr(Batch, "begin_touching", begin_slowly)
        into = np.full(LAYOUT.block_nbytes, 7, np.uint8)
        reading = asyncio.create_task(tier.get(chain(1), [into]))
        await asyncio.to_thread(copying.wait)
        try:
            reading.cancel()
            while not batches[0].abandoned:  # noqa: ASYNC110 - a batch tells no one
                await asyncio.sleep(0)
            for _ in range(10):
                reading.cancel()
                await asyncio.sleep(0)
            assert not reading.done(), "a thread is about to copy into its memory"
        finally:
            may_copy.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert np.array_equal(into, payload(chain(1)[0]))


async def test_a_tier_can_be_closed_while_its_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stall = Stall(monkeypatch, "read")
    async with await open_tier(tmp_path) as tier:
        await put_chain(tier, chain(4))
    tier = await open_tier(tmp_path, io_deadline_s=0.1)
    stall.opened.clear()
    assert await held(tier, 4) == 0
    async with asyncio.timeout(60):
        await tier.close()
    assert "stays locked" in caplog.text
    stall.opened.set()
