"""Calls on a store may be cancelled at any moment: no byte, slot or waiter is lost by it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.tiers.copier import Copier
from tests.kvstore.fake_pool import FakePool
from tests.kvstore.memory_disk import MemoryDisk
from tests.kvstore.nodes import chain, key
from tests.kvstore.small_store import get, make, payload, put, settled, with_disk

CHAINS, LENGTH, TURNS = 4, 3, 24


async def busy_store() -> tuple[TieredStore, MemoryDisk]:
    """Blocks in host memory, room for two on their way to a disk that waits."""
    store, disk = await with_disk(CHAINS * LENGTH, 4 * CHAINS * LENGTH, watermark=1.0, queue_blocks=2)
    disk.may_write.clear()
    for number in range(CHAINS):
        assert await put(store, LENGTH, number) == LENGTH
    return store, disk


def call(store: TieredStore, kind: str, number: int) -> Coroutine[Any, Any, object]:
    assert store.writes is not None
    writes = store.writes
    number, block = divmod(number, LENGTH)
    name = key(block, number)
    calls: dict[str, Coroutine[Any, Any, object]] = {
        "submit": writes.submit(name),
        "room": writes.room(),
        "drained": writes.drained(),
        "flush": store.flush(60.0),
        "get": store.get([key(0, number)], [np.zeros_like(payload(name))]),
        "prefetch": store.prefetch(chain(LENGTH, number)),
        "put": put(store, LENGTH, number),
        "remove": store.remove([name]),
    }
    chosen = calls.pop(kind)
    for other in calls.values():
        other.close()
    return chosen


async def all_is_released(store: TieredStore, disk: MemoryDisk) -> None:
    assert store.writes is not None
    disk.may_write.set()
    disk.is_stalled = False
    async with asyncio.timeout(60):
        await settled(store)
    assert store.writes.used_nbytes == 0
    assert store.writes.has_room
    assert store.host.num_pinned == 0
    assert not store.writes._writes
    store.check_integrity()
    # There is room for others, and they are written.
    assert await put(store, 1, CHAINS) == 1
    async with asyncio.timeout(60):
        assert await store.writes.submit(key(0, CHAINS))
        await settled(store)
    assert key(0, CHAINS) in disk
    store.check_integrity()
    await store.close()


@pytest.mark.parametrize("turn", range(TURNS))
async def test_a_waiter_cancelled_in_the_turn_in_which_room_is_given(turn: int) -> None:
    store, disk = await busy_store()
    assert store.writes is not None
    waiters = [asyncio.create_task(call(store, "submit", number)) for number in range(CHAINS * LENGTH)]
    while store.writes._has_room():  # noqa: ASYNC110
        await asyncio.sleep(0)
    disk.may_write.set()
    for _ in range(turn):
        await asyncio.sleep(0)
    for waiter in waiters[::2]:
        waiter.cancel()
    async with asyncio.timeout(60):
        done = await asyncio.gather(*waiters, return_exceptions=True)
    assert all(result is True for result in done[1::2])
    await all_is_released(store, disk)


KINDS = ["submit", "room", "drained", "flush", "get", "prefetch", "put", "remove"]
CALLS = st.tuples(st.sampled_from(KINDS), st.integers(0, CHAINS * LENGTH - 1), st.integers(0, TURNS))


# Not shrunk: what is wrong here hangs, and each smaller example would hang as long.
@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(CALLS, min_size=1, max_size=12), st.integers(0, TURNS), st.booleans())
def test_any_calls_cancelled_at_any_await(
    calls: list[tuple[str, int, int]], written_at: int, stalls: bool
) -> None:
    """(kind, block, turn of its cancellation); the disk goes on, or stalls, at ``written_at``."""

    async def run() -> None:
        store, disk = await busy_store()
        tasks = [asyncio.create_task(call(store, kind, number)) for kind, number, _ in calls]
        for turn in range(TURNS):
            if turn == written_at:
                disk.is_stalled = stalls
                disk.may_write.set()
            for task, (_, _, cancelled_at) in zip(tasks, calls, strict=True):
                if cancelled_at == turn:
                    task.cancel()
            await asyncio.sleep(0)
        disk.may_write.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks, return_exceptions=True)
        await all_is_released(store, disk)

    asyncio.run(run())


async def test_a_waiter_goes_on_when_what_it_waits_for_is_removed() -> None:
    store, disk = await busy_store()
    assert store.writes is not None
    first, second = key(LENGTH - 1, 0), key(LENGTH - 1, 1)
    await asyncio.sleep(0)  # the queue's task waits for a block
    # In one turn, before the queue's task runs: no write begins, so none ends.
    flushed = asyncio.create_task(store.flush(60.0))
    removed = asyncio.create_task(store.remove([first, second]))
    assert store.writes.offer(first)
    assert store.writes.offer(second)
    await removed
    disk.may_write.set()
    async with asyncio.timeout(60):
        await flushed
    assert len(disk) == CHAINS * LENGTH - 2
    await all_is_released(store, disk)


async def test_a_copy_that_is_cancelled_twice_has_ended() -> None:
    copier, may_end, ended = Copier(1), threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(60)
        ended.set()

    task = asyncio.create_task(copier.run(work))
    for _ in range(3):
        await asyncio.sleep(0.001)
        task.cancel()
    await asyncio.sleep(0.001)
    assert not task.done(), "its thread still writes"
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    await copier.close()


async def test_a_pool_that_fails_unexpectedly_costs_its_blocks_and_nobody_waits_for_ever() -> None:
    pool = FakePool(loop=asyncio.get_running_loop())  # its blocks are copied on a thread
    disk = MemoryDisk(8)
    store = make(8, pool=pool, ssd=disk)
    pool.store = store
    await store.start()
    for number, name in enumerate(chain(2)):
        pool.seal(name, chain(2)[number - 1] if number else None, payload(name))
    pool.failing = ZeroDivisionError("a bug")  # type: ignore[assignment]
    for name in reversed(chain(2)):
        assert pool.evict(name)
    async with asyncio.timeout(60):
        await store.copied()
        pool.failing = None
        assert not store.demoter.demoting
        assert await put(store, 2) == 2
        await store.flush(60.0)
        assert len(disk) == 2
        await get(store, 2)
        store.check_integrity()
        await store.close()
