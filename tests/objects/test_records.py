"""The record in Redis is what counts: over clocks, restarts of nodes, and a Redis that is away or lost its
data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from moonpool.kvstore.client import StoreClient
from moonpool.kvstore.client.errors import (
    BadObject,
    NoRecords,
    NoStoreNodes,
    OutcomeUnknown,
    PutFailed,
    StoreClientError,
)
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.objects.records import Records
from tests.kvstore.redis_servers import until
from tests.store_node.conftest import StoreCluster, running

SMALL, LARGE = np.arange(10), np.arange(50_000)


@pytest.fixture
async def cluster() -> AsyncIterator[StoreCluster]:
    async with running() as cluster:
        yield cluster


async def value_of(store: StoreClient, name: str) -> int | None:
    found = await store.get(name)
    return None if found is None else int(found[0])


async def test_what_changed_while_a_node_was_away_stays_so(cluster: StoreCluster, tmp_path: Path) -> None:
    await asyncio.gather(*(cluster.start(name, store__ssd__path=tmp_path) for name in "ab"))
    async with cluster.client() as store:
        for name in ("removed", "replaced", "kept"):
            for value in (SMALL, LARGE):
                await store.put(f"{name} {value.size}", value, copies=2)
        await cluster.nodes["a"].stop(20.0)
        for value in (SMALL, LARGE):
            await store.remove(f"removed {value.size}")
            await store.put(f"replaced {value.size}", value + 7)
        await cluster.start("a")
        await cluster.kill("b")
        for value in (SMALL, LARGE):
            assert await value_of(store, f"kept {value.size}") == 0
            assert await store.get(f"removed {value.size}") is None
            with pytest.raises(Exception, match="is on b, and none of them answers"):
                await store.get(f"replaced {value.size}")
        assert sorted(each.name for each in await store.ls()) == [
            f"{name} {value.size}" for name in ("kept", "replaced") for value in (SMALL, LARGE)
        ]
        usage = (await store.usage())["a"]
        assert usage.num_objects == 2


async def test_without_redis_a_put_fails_and_a_read_says_that_it_is_stale(cluster: StoreCluster) -> None:
    await asyncio.gather(cluster.start("a"), cluster.start("b"))
    server = cluster.redis
    async with cluster.client() as store:
        await store.put("x", SMALL, copies=2)
        await store.put("large", LARGE)
        await server.kill()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.put("x", SMALL + 1),
            lambda: store.put("y", LARGE),
            lambda: store.remove("x"),
            lambda: store.get("x"),
            lambda: store.ls(),
        ]
        for call in calls:
            with pytest.raises((NoRecords, PutFailed), match="cannot be looked up or changed"):
                await call()
        stale: set[str] = set()
        assert (await store.get("x", stale=stale) == SMALL).all()
        assert (await store.get("large", stale=stale) == LARGE).all()
        assert await store.get("never", stale=stale) is None
        assert stale == {"x", "large", "never"}
        assert [each.name for each in await store.ls(stale=stale)] == ["large", "x"]
        # A Redis that comes back without its data is told again; what was removed before stays removed.
        await server.start()
        await until(lambda: both(store))
        await until(lambda: answers(store, "x"))
        await until(lambda: answers(store, "large"))
        assert (await store.get("x") == SMALL).all()
        assert (await store.get("large") == LARGE).all()
        stat = await store.stat("x")
        assert stat is not None
        assert (stat.nodes, stat.copies) == (("a", "b"), 2)
        await store.put("x", SMALL + 1)
        assert await value_of(store, "x") == 1


async def both(store: StoreClient) -> bool:
    try:
        return len(await store.nodes()) == 2
    except NoStoreNodes:
        return False  # Redis is back, and none has told it yet that it is there


async def answers(store: StoreClient, name: str) -> bool:
    try:
        return await store.get(name) is not None
    except (StoreClientError, IndexUnavailable):
        return False


async def test_a_lost_copy_is_made_again_on_another_host(cluster: StoreCluster) -> None:
    await asyncio.gather(*(cluster.start(name) for name in "abc"))
    async with cluster.client() as store:
        await store.put("x", LARGE, copies=2, node="a")
        stat = await store.stat("x")
        assert stat is not None
        (other,) = set(stat.nodes) - {"a"}
        # Its next life has nothing: the copy was in memory.
        await cluster.kill("a")
        await cluster.start("a")

        async def repaired() -> bool:
            stat = await store.stat("x")
            return stat is not None and len(stat.nodes) == 2

        await until(repaired)
        await cluster.kill(other)
        assert (await store.get("x") == LARGE).all()


async def test_copies_on_one_host_are_not_counted_as_two(cluster: StoreCluster) -> None:
    await asyncio.gather(*(cluster.start(name, node__host_id="one") for name in "ab"))
    async with cluster.client() as store:
        with pytest.raises(PutFailed, match=r"can be on 1 hosts, 2 were requested.*node\.host_id"):
            await store.put("x", SMALL, copies=2)
        assert await store.get("x") is None


@pytest.mark.slow
async def test_a_put_without_an_answer_says_that_its_outcome_is_unknown(cluster: StoreCluster) -> None:
    await cluster.start("a")
    assert cluster.redis.process is not None
    redis = psutil.Process(cluster.redis.process.pid)
    async with cluster.client() as store:
        await store.put("x", SMALL)
        redis.suspend()
        # Redis answered just now, so the node begins.
        with pytest.raises(OutcomeUnknown, match="not known whether 'x' was stored"):
            await store.put("x", SMALL + 1)
        redis.resume()
        # Here it arrives in the end.
        await until(lambda: is_one(store))


async def is_one(store: StoreClient) -> bool:
    return await value_of(store, "x") == 1


async def test_time_to_live_and_pins(cluster: StoreCluster) -> None:
    await cluster.start("a", store_node__object_nbytes="1MiB")
    async with cluster.client() as store:
        with pytest.raises(BadObject, match="ttl_s"):
            await store.put("x", SMALL, ttl_s=0)
        with pytest.raises(BadObject, match="pin"):
            await store.put("x", SMALL, pin="forever")
        await store.put("short", SMALL, ttl_s=0.2)
        await store.put("long", SMALL, ttl_s=1000.0)
        stat = await store.stat("long")
        assert stat is not None
        assert 900 < stat.expires_s - time.time() < 1100
        await until(lambda: is_gone(store, "short"))
        assert [each.name for each in await store.ls()] == ["long"]
        # 16 chunks of 64 KiB; each object takes two.
        value = np.zeros(128 << 10, np.uint8)
        await store.put("hard", value, pin="hard")
        await store.put("soft", value, pin="soft")
        for number in range(20):
            await store.put(f"{number}", value)
        kept = {each.name: each.pin for each in await store.ls()}
        assert kept == {"long": "", "hard": "hard", "soft": "soft", **{str(n): "" for n in range(14, 20)}}
        await store.put("hard 2", value, pin="hard")
        await store.put("hard 3", value, pin="hard")
        with pytest.raises(PutFailed, match="half of its room"):
            await store.put("hard 4", value, pin="hard")
        # What is not pinned goes first, then what is softly.
        await store.put("large", np.zeros(640 << 10, np.uint8))
        assert {each.name for each in await store.ls()} == {"long", "hard", "hard 2", "hard 3", "large"}


async def is_gone(store: StoreClient, name: str) -> bool:
    return not await store.exists(name)


@pytest.mark.slow
async def test_an_emptied_redis_is_told_again_what_the_disks_have(
    cluster: StoreCluster, tmp_path: Path
) -> None:
    """Redis and the node start again together, as after the loss of the machine's power."""
    await cluster.start("a", store__ssd__path=tmp_path)
    async with cluster.client() as store:
        await store.put("x", SMALL)
        await store.put("y", LARGE)
        await store.put("removed", LARGE)
        await store.remove("removed")
        await cluster.nodes["a"].stop(20.0)
        redis = connect(cluster.url)
        await redis.flushall()
        await redis.aclose()
        await cluster.start("a")
        await until(lambda: answers(store, "y"))
        assert (await store.get("x") == SMALL).all()
        assert (await store.get("y") == LARGE).all()
        assert await store.get("removed") is None


async def test_a_copy_with_other_bytes_than_the_record_says_is_dropped(cluster: StoreCluster) -> None:
    await asyncio.gather(cluster.start("a"), cluster.start("b"))
    async with cluster.client() as store:
        await store.put("x", LARGE, copies=2)
        redis = connect(cluster.url)
        index = KVIndex(redis)
        records = Records(index, restoring_s=1.0)
        owner, key = store.tenant.owner, store.tenant.key("x")
        (record,) = await records.read([(owner, key)])
        assert record is not None
        assert record.body.info.checksum
        record.body.info.checksum += 1
        assert await records.swap(record, record.body.places)
        await until(lambda: is_gone(store, "x"))
        await redis.aclose()
