"""The record in Redis is what counts: over clocks, restarts of nodes, and a Redis that is away or lost its
data."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from moonpool.kvstore.client import StoreClient
from moonpool.kvstore.client.connections import preference_order
from moonpool.kvstore.client.errors import (
    BadObject,
    NoRecords,
    NoStoreNodes,
    ObjectUnreachable,
    OutcomeUnknown,
    PutFailed,
    StoreClientError,
)
from moonpool.kvstore.errors import IndexUnavailable, raise_one
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.objects.errors import ChangeUnknown, RecordsLost
from moonpool.kvstore.objects.record_values import bucket_of
from moonpool.kvstore.objects.records import Records
from moonpool.protos import node_pb2, store_pb2
from moonpool.runtime.errors import NodeUnavailable
from tests.kvstore.redis_servers import until
from tests.processes import stop
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

        async def only_kept() -> bool:
            return (await store.usage())["a"].num_objects == 2

        await until(only_kept)  # the node compares what it has with the records a moment after its start


@pytest.mark.slow
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
        await until(lambda: has_places(store, "x", ("a", "b"), 2))  # each node tells what it has
        await store.put("x", SMALL + 1)
        assert await value_of(store, "x") == 1


async def has_places(store: StoreClient, name: str, nodes: tuple[str, ...], copies: int) -> bool:
    stat = await store.stat(name)
    return stat is not None and (stat.nodes, stat.copies) == (nodes, copies)


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
        stop(redis.pid)
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
        expected = {"long": "", "hard": "hard", "soft": "soft", **{str(n): "" for n in range(14, 20)}}

        async def are_kept() -> bool:
            return {each.name: each.pin for each in await store.ls()} == expected

        await until(are_kept)  # the record of what was evicted goes a moment later
        await store.put("hard 2", value, pin="hard")
        await store.put("hard 3", value, pin="hard")
        with pytest.raises(PutFailed, match="half of its room"):
            await store.put("hard 4", value, pin="hard")
        # What is not pinned goes first, then what is softly.
        await store.put("large", np.zeros(640 << 10, np.uint8))

        async def are_left() -> bool:
            return {each.name for each in await store.ls()} == {"long", "hard", "hard 2", "hard 3", "large"}

        await until(are_left)


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


async def test_a_node_that_knows_nothing_of_a_loss_is_told_by_those_who_do(cluster: StoreCluster) -> None:
    """It was started without the folder that remembers what was in Redis."""
    redis = connect(cluster.url)
    index = KVIndex(redis)
    known, ignorant = (Records(index, restoring_s=0.5) for _ in range(2))
    name = (bytes(16), bytes(16))
    info = store_pb2.ObjectInfo(key=name[1], storage=1)
    await known.put([(store_pb2.ObjectRecord(owner=name[0], info=info, places=["a"]), 0)])
    (record,) = await known.read([name])
    assert record is not None
    await redis.flushall()
    assert await ignorant.read([name]) == [None], "nobody has told Redis yet"
    with pytest.raises(RecordsLost):
        await known.read([name])
    for _ in range(2):
        with pytest.raises(RecordsLost):
            await ignorant.read([name])
    await known.restore(record.body)
    late = Records(index, restoring_s=0.5)
    with pytest.raises(RecordsLost):
        await late.put([(record.body, 0)])
    bucket = bucket_of(name[1])
    for each in (known, ignorant):
        await until(lambda each=each: asyncio.sleep(0, each.restored(bucket)))
        assert [found and found.storage for found in await each.read([name])] == [1]
    await redis.aclose()


async def test_a_change_of_which_a_part_was_made_is_not_called_refused(cluster: StoreCluster) -> None:
    """Its caller would drop the bytes that the other part now names."""
    redis = connect(cluster.url)
    index = KVIndex(redis)
    records = Records(index, restoring_s=60.0)
    owner = bytes(16)
    names = [(owner, bytes([number]) * 16) for number in range(2)]
    buckets = [bucket_of(key) for _, key in names]
    assert buckets[0] != buckets[1]

    def versions(storage: int) -> list[tuple[store_pb2.ObjectRecord, int]]:
        infos = [store_pb2.ObjectInfo(key=key, storage=storage) for _, key in names]
        return [(store_pb2.ObjectRecord(owner=owner, info=info, places=["a"]), 0) for info in infos]

    await records.put(versions(1))
    await redis.delete(f"{index.namespace}:objects:{buckets[1]}")
    with pytest.raises(ChangeUnknown, match=r"a part was changed.*Redis lost its data"):
        await records.put(versions(2))
    (changed,) = await records.read(names[:1])
    assert changed is not None
    assert changed.storage == 2
    with pytest.raises(RecordsLost):  # the loss is known: nothing is sent
        await records.put(versions(3))
    await redis.aclose()


async def test_a_get_whose_grant_lapses_reads_another_copy(cluster: StoreCluster, tmp_path: Path) -> None:
    await asyncio.gather(*(cluster.start(name, store__ssd__path=tmp_path) for name in "ab"))
    async with cluster.client() as store:
        # Which the client asks for first.
        first = {preference_order(store.tenant.key(name), "ab")[0]: name for name in map(str, range(20))}
        for name in first.values():
            await store.put(name, LARGE, copies=2)
        await asyncio.gather(*(cluster.nodes[name].stop(20.0) for name in "ab"))
        del cluster.nodes["a"]
        # It grants its memory for twice as long.
        await cluster.start("a", store__ssd__path=tmp_path, transfer__deadline_s=0.0005)
        await cluster.start("b")
        await until(lambda: both(store))
        assert (await store.get(first["a"]) == LARGE).all()
        await cluster.nodes["b"].stop(20.0)
        with pytest.raises(ObjectUnreachable, match="was not read: store node a granted its memory"):
            await store.get(first["a"])


async def test_leases_are_ended_also_if_the_call_that_says_so_fails(cluster: StoreCluster) -> None:
    node = await cluster.start("a")

    async def num_pinned() -> int:
        tiers = (await (await store.nodes())["a"]._node.Status(node_pb2.StatusRequest())).tiers
        return sum(tier.num_used_blocks for tier in tiers)

    async with cluster.client() as store:
        await store.put("x", LARGE)
        there = (await store.nodes())["a"]
        wanted = store_pb2.OpenObject(key=store.tenant.key("x"))
        opened, _, _ = await there.open(store.tenant.owner, [wanted])
        assert await num_pinned()
        stop(node.pid)
        there._done += [lease_id for each in opened for lease_id in each.lease_id]
        there._deadline_s = 0.2
        with pytest.raises(NodeUnavailable):
            await there.open(store.tenant.owner, [])
        there._deadline_s = 30.0
        os.kill(node.pid, signal.SIGCONT)
        # Long before they lapse.
        async with asyncio.timeout(20.0):
            while await num_pinned():  # noqa: ASYNC110 (another process decides)
                await asyncio.sleep(0.01)


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


def test_of_several_failures_the_gravest_is_raised_and_none_is_hidden() -> None:
    refused, unknown = NoRecords("Redis is away"), OutcomeUnknown("x was stored", "no answer")
    raise_one(["done", None], OutcomeUnknown)
    with pytest.raises(OutcomeUnknown) as raised:
        raise_one([refused, "done", unknown, KeyError("a defect")], OutcomeUnknown)
    assert "Redis is away" in raised.value.__notes__[0]
    assert "a defect" in raised.value.__notes__[1]
