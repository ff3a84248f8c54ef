"""A mirror that differs from Redis notices, says so, and mends itself; one that only lags does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index import metrics
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.mirror_check import NUM_PARTS
from moonpool.kvstore.index.redis.changes import encode
from moonpool.kvstore.index.redis.entries import LogPage
from moonpool.kvstore.index.redis.kv_index import KVIndex
from tests.kvstore.nodes import FakeNode, chain, next_batch
from tests.kvstore.redis_servers import until


@pytest.fixture
async def mirror(index: KVIndex) -> AsyncIterator[IndexMirror]:
    mirror = IndexMirror(index, lease_ttl_s=30, tick_s=0.02)
    await mirror.start()
    yield mirror
    await mirror.close()


@pytest.fixture
async def node(index: KVIndex, mirror: IndexMirror) -> AsyncIterator[FakeNode]:
    node = await FakeNode(index, "a", lease_ttl_s=30).start()
    node.hold(1000)
    await node.settled()
    await mirror.caught_up()
    yield node
    await node.kill()


async def mended(mirror: IndexMirror, expected: dict[Any, Tier]) -> None:
    async def equal() -> bool:
        return mirror.held_by("a") == expected

    await until(equal)
    while not mirror._copy.blocks.is_settled("a"):
        await mirror.caught_up()
    assert await mirror.check() == 0
    assert metrics.mirror_difference._value.get() == 0
    mirror._copy.blocks.check_integrity()


async def test_blocks_the_mirror_lost_come_back(mirror: IndexMirror, node: FakeNode) -> None:
    assert await mirror.check() == 0
    before = metrics.mirror_differences._value.get()
    mirror._copy.blocks.remove("a", b"".join(chain(1000)[300:310]))
    assert await mirror.check() == 10
    assert metrics.mirror_differences._value.get() == before + 10
    await mended(mirror, node.held)
    assert mirror.longest_prefix(chain(1000)) == {"a": 1000}


async def test_blocks_and_tiers_the_mirror_made_up_go(mirror: IndexMirror, node: FakeNode) -> None:
    mirror._copy.blocks.store("a", b"".join(chain(20, number=7)), Tier.HOST)
    mirror._copy.blocks.store("a", b"".join(chain(5)), Tier.SSD)
    assert await mirror.check() == 25
    await mended(mirror, node.held)


async def test_a_change_that_never_reached_the_stream_is_found(
    mirror: IndexMirror, node: FakeNode, index: KVIndex, redis: Any
) -> None:
    extra = chain(3, number=9)
    batch = next_batch(index, "a", encode(dict.fromkeys(extra, Tier.POOL), ()))
    await redis.rpush(index._log_prefix + "a", batch)
    assert await mirror.check() == 3
    await mended(mirror, {**node.held, **dict.fromkeys(extra, Tier.POOL)})


async def test_a_repair_that_redis_interrupts_is_made_afterwards(
    mirror: IndexMirror, node: FakeNode, index: KVIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_log, failed = index.read_log, asyncio.Event()

    async def fail_once(node_id: str, position: int) -> LogPage | None:
        if position > 0 and not failed.is_set():
            failed.set()
            raise IndexUnavailable("read a log", "connection reset")
        return await read_log(node_id, position)

    monkeypatch.setattr(index, "read_log", fail_once)
    mirror._copy.blocks.store("a", b"".join(chain(20, number=7)), Tier.HOST)
    mirror._follower.suspects.add("a")
    await failed.wait()
    await mended(mirror, node.held)


async def test_nodes_the_mirror_lost_or_kept_are_found(
    mirror: IndexMirror, node: FakeNode, index: KVIndex, redis: Any
) -> None:
    mirror._copy.leave("a", "left")
    await mirror.check()
    await mended(mirror, node.held)
    await node.kill()
    await redis.zrem(index._leases, "a")
    await redis.unlink(index._node_prefix + "a", index._log_prefix + "a")
    await mirror.check()

    async def gone() -> bool:
        return "a" not in mirror.nodes

    await until(gone)


async def test_all_parts_together_are_everything(mirror: IndexMirror, node: FakeNode) -> None:
    check = mirror._check
    mirror._copy.blocks.remove("a", b"".join(chain(1000)))
    counts = [await check._compare_node("a", part, NUM_PARTS) for part in range(NUM_PARTS)]
    assert sum(counts) == 1000


async def test_a_mirror_is_not_blamed_for_changes_on_their_way(mirror: IndexMirror, node: FakeNode) -> None:
    async def churn() -> None:
        for turn in range(60):
            node.hold(1000 - 13 * (turn % 7), number=0)
            node.hold(50 * (turn % 5), number=1)
            await asyncio.sleep(0.002)

    churning = asyncio.create_task(churn())
    while not churning.done():
        assert await mirror.check() == 0
    await node.settled()
    assert await mirror.check() == 0


async def test_the_schedule_finds_it_without_being_asked(index: KVIndex, node: FakeNode) -> None:
    mirror = IndexMirror(index, lease_ttl_s=30, tick_s=0.02, check_interval_s=0.001)
    await mirror.start()
    try:
        mirror._copy.blocks.remove("a", b"".join(chain(1000)[-1:]))

        async def whole() -> bool:
            return mirror.longest_prefix(chain(1000)) == {"a": 1000}

        await until(whole)
    finally:
        await mirror.close()
