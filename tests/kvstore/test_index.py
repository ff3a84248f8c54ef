"""Laws of the index in Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import ChangesCorrupt, EpochSuperseded, IndexUnavailable, NodeUnknown, StoreError
from moonpool.kvstore.index.redis.changes import decode, encode, split
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord, RecordCorrupt
from moonpool.runtime.replicas.identity import Replica
from tests.kvstore.nodes import FakeNode, chain
from tests.kvstore.redis_servers import Server, until


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def record(node_id: str = "a", epoch: int = 1, **fields: Any) -> NodeRecord:
    return NodeRecord(node_id, epoch, "prefill", **fields)


def test_a_record_survives_json_and_keeps_what_a_newer_version_wrote() -> None:
    full = record(
        epoch=2**64 - 1,
        kv_address=b"\x00\xff",
        load=NodeLoad(num_running=3, free_blocks=7),
        profile={"x": 0.5},
        links={"b": 2.5e9},
        replica=Replica("n", 1, 2, node_pid=17, metrics_url="http://node/metrics", start_number=3),
    )
    assert NodeRecord.from_json(full.to_json()) == full
    newer = full.to_json()[:-1] + b',"colour":"blue"}'
    assert NodeRecord.from_json(newer).extra == {"colour": "blue"}
    assert b'"colour":"blue"' in NodeRecord.from_json(newer).to_json()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"node_id":"a","epoch":"x","role":"r"}',
        b'{"node_id":"a","epoch":"1","role":"r","links":{"b":"fast"}}',
        b'{"node_id":"a","epoch":"1","role":"r","replica":{"node_id":"n"}}',
        b'{"node_id":"a","epoch":"1","role":"r","replica":[1]}',
    ],
)
def test_a_broken_record_is_refused(data: bytes) -> None:
    with pytest.raises(RecordCorrupt):
        NodeRecord.from_json(data)


def test_changes_decode_to_what_was_encoded() -> None:
    stored = {key(1): Tier.POOL, key(2): Tier.HOST, key(3): Tier.POOL}
    groups = {op: split(packed) for op, packed in decode(encode(stored, [key(4)]))}
    assert groups == {0: [key(1), key(3)], 1: [key(2)], 255: [key(4)]}


@pytest.mark.parametrize("data", [b"\x00", b"\x09\x00\x00\x00\x00", b"\x00\x02\x00\x00\x00" + b"x" * 31])
def test_broken_changes_are_refused(data: bytes) -> None:
    with pytest.raises(ChangesCorrupt):
        list(decode(data))


async def test_what_is_published_is_what_a_snapshot_shows(index: KVIndex) -> None:
    await index.register(record(), 5)
    await index.publish("a", 1, [(key(1), Tier.POOL), (key(2), Tier.POOL), (key(3), Tier.HOST)], [])
    await index.publish("a", 1, [(key(2), Tier.SSD)], [key(3), key(9)])
    assert await index.snapshot() == {"a": {key(1): Tier.POOL, key(2): Tier.SSD}}
    assert await index.nodes() == {"a": record()}


async def test_a_new_epoch_drops_what_the_old_one_held_in_one_step(index: KVIndex) -> None:
    await index.register(record(epoch=9), 5)
    await index.publish("a", 9, [(key(1), Tier.POOL)])
    await index.register(record(epoch=10), 5)
    assert await index.snapshot() == {"a": {}}
    with pytest.raises(EpochSuperseded) as caught:
        await index.publish("a", 9, [(key(1), Tier.POOL)])
    assert caught.value.current == 10
    with pytest.raises(EpochSuperseded):
        await index.register(record(epoch=9), 5)
    with pytest.raises(EpochSuperseded):
        await index.heartbeat(record(epoch=9), 5)
    assert await index.snapshot() == {"a": {}}


async def test_a_node_that_left_is_unknown(index: KVIndex) -> None:
    await index.register(record(), 5)
    await index.publish("a", 1, [(key(1), Tier.POOL)])
    assert await index.deregister("a", 1)
    assert not await index.deregister("a", 1)
    assert await index.snapshot() == {}
    for call in (index.publish("a", 1, [(key(1), Tier.POOL)]), index.heartbeat(record(), 5)):
        with pytest.raises(NodeUnknown):
            await call


async def test_only_a_lapsed_lease_is_dropped_and_a_heartbeat_renews_it(index: KVIndex) -> None:
    async def lapsed() -> bool:
        return (await index.watch()).lapsed == ("a",)

    await index.register(record(), 5)
    assert (await index.watch()).lapsed == ()
    assert not await index.drop("a", 1)
    await index.heartbeat(record(), 0.001)
    await until(lapsed)
    assert not await index.drop("a", 2)
    await index.heartbeat(record(), 5)
    assert not await index.drop("a", 1)
    await index.heartbeat(record(), 0.001)
    await until(lambda: index.drop("a", 1))
    assert await index.nodes() == {}


async def test_events_are_numbered_without_holes_and_old_ones_go(redis: Any) -> None:
    index = KVIndex(redis, "test", history_nbytes=20_000)
    await index.register(record(), 60)
    for number in range(2000):
        await index.publish("a", 1, [(key(number), Tier.POOL)])
    events = await index.read_events(0, 10_000)
    numbers = [event.seq for event in events]
    assert numbers == list(range(numbers[0], 2003))
    assert 20_000 / 100 <= len(numbers) < 700
    assert await index.event(2002) == events[-1]
    assert await index.event(1) is None


async def test_repeated_true_changes_replace_the_oldest_batches_of_a_log(index: KVIndex) -> None:
    base = await index.register(record(), 5)
    for number in range(4):
        await index.publish("a", 1, [(key(number), Tier.POOL)])
    again = encode({key(0): Tier.POOL, key(1): Tier.POOL}, ())
    await index.publish_changes("a", 1, b"", quiet=again, base=base, trim=2)
    # Repeating the call, as after a lost answer, must not drop two batches more.
    await index.publish_changes("a", 1, b"", quiet=again, base=base, trim=2)
    page = await index.read_log("a")
    assert page is not None
    assert (page.base, len(page.batches)) == (base + 2, 3)
    assert await index.snapshot() == {"a": {key(number): Tier.POOL for number in range(4)}}


async def test_namespaces_do_not_see_each_other(redis: Any) -> None:
    ours, theirs = KVIndex(redis, "ours"), KVIndex(redis, "theirs")
    await ours.register(record(), 5)
    assert await theirs.nodes() == {}
    for bad in ("", "a{b", "}"):
        with pytest.raises(StoreError):
            KVIndex(redis, bad)


async def test_a_dead_redis_is_one_named_error_and_the_same_client_works_again(
    index: KVIndex, server: Server
) -> None:
    await index.register(record(), 5)
    before = await index.watch()
    await server.kill()
    with pytest.raises(IndexUnavailable, match="heartbeat"):
        await index.heartbeat(record(), 5)
    await server.start()
    with pytest.raises(NodeUnknown):
        await index.heartbeat(record(), 5)
    assert (await index.watch()).instance != before.instance


async def test_resp3_gives_the_same_answers(server: Server) -> None:
    client = connect(server.url + "?protocol=3")
    index = KVIndex(client, "test")
    await index.register(record(), 5)
    await index.publish("a", 1, [(key(1), Tier.POOL)])
    assert [event.kind for event in await index.read_events(0, 10)] == [b"J", b"C", b"B"]
    assert await index.read_events(3, 10, 0.01) == []
    assert await index.snapshot() == {"a": {key(1): Tier.POOL}}
    await client.aclose()


@pytest.mark.parametrize(
    "url",
    [
        *("http://x", "redis+sentinel://host:26379", "redis+sentinel://:p@h1,h2:7/main", "rediss://h:1/2"),
        *(
            "redis+cluster://u:p%40@h1:1,h2",
            "rediss+cluster://h1?ssl_ca_certs=/ca.pem",
            "rediss+sentinel://h/m",
        ),
    ],
)
def test_urls_are_understood_or_refused(url: str) -> None:
    if url in ("http://x", "redis+sentinel://host:26379"):
        with pytest.raises(StoreError):
            connect(url)
    else:
        connect(url)


async def test_a_node_disowns_only_what_it_does_not_hold(index: KVIndex) -> None:
    node = await FakeNode(index, "a").start()
    node.hold(4)
    await node.settled()
    await index.publish("a", 1, stored=[(key, Tier.POOL) for key in chain(9)])
    assert node.publisher.retract(chain(9)) == 5
    await node.settled()
    assert (await index.snapshot())["a"] == node.held
    await node.kill()


async def test_a_connection_that_broke_unseen_is_a_redis_that_does_not_answer(server: Server) -> None:
    """Under uvloop, as in every daemon: writing to it is a RuntimeError there."""

    async def use() -> None:
        redis = connect(server.url)
        index = KVIndex(redis)
        assert await index.node_ids() == []
        (connection,) = redis.connection_pool._available_connections
        connection._writer.transport.abort()
        with pytest.raises(IndexUnavailable, match="the handler is closed"):
            await index.node_ids()
        assert await index.node_ids() == []
        await redis.aclose()

    await asyncio.to_thread(uvloop.run, use())
