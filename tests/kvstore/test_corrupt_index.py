"""What is corrupt in Redis is skipped, counted and named; the rest of the index is followed."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.kvstore.index import metrics
from moonpool.kvstore.index.comparison import verify
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.changes import encode
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord, RecordCorrupt
from moonpool.kvstore.objects.records import Records
from moonpool.protos import store_pb2
from tests.kvstore.nodes import FakeNode, chain
from tests.kvstore.redis_servers import until

Corrupt = Callable[[Any, KVIndex], Awaitable[object]]
NODE, LOG = "{test}:node:a", "{test}:log:a"


def records(**wrong: object) -> bytes:
    """A record of node a with wrong fields."""
    return orjson.dumps({**orjson.loads(NodeRecord("a", 1, "prefill").to_json()), **wrong})


def kept(redis: Any, index: KVIndex, body: bytes) -> Awaitable[object]:
    """Make it the record of node a, as if the node itself had written it."""
    return redis.hset(NODE, "record", index._entries._seal(b"H", index._registered["a"], body, 1 << 62))


async def replaced(redis: Any, key: str) -> None:
    await redis.delete(key)
    await redis.set(key, b"of another type")


RECORDS: dict[str, Corrupt] = {
    "no JSON": lambda redis, index: kept(redis, index, b"\xff{"),
    "a list": lambda redis, index: kept(redis, index, b"[]"),
    "no epoch": lambda redis, index: kept(redis, index, orjson.dumps({"node_id": "a"})),
    "of another node": lambda redis, index: kept(redis, index, NodeRecord("c", 1, "prefill").to_json()),
    "null cost": lambda redis, index: kept(redis, index, records(profile={"prefill_base_s": None})),
    "not sealed": lambda redis, index: redis.hset(NODE, "record", records()),
    "no record": lambda redis, index: redis.hdel(NODE, "record"),
    "no base": lambda redis, index: redis.hset(NODE, "base", "x"),
    "a base that is no whole number": lambda redis, index: redis.hset(NODE, "base", "1e1"),
    "epoch": lambda redis, index: redis.hset(NODE, "epoch", "x"),
    "node of another type": lambda redis, index: replaced(redis, NODE),
    "log of another type": lambda redis, index: replaced(redis, LOG),
}


def num_skipped() -> float:
    (family,) = metrics.skipped_entries.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


@pytest.mark.parametrize("corrupt", RECORDS.values(), ids=RECORDS.keys())
async def test_a_corrupt_record(
    index: KVIndex,
    redis: Any,
    nodes: dict[str, FakeNode],
    mirror: IndexMirror,
    corrupt: Corrupt,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = num_skipped()
    await corrupt(redis, index)
    # A mirror that starts.
    late = IndexMirror(index, lease_ttl_s=10.0, tick_s=0.02)
    await late.start()
    assert set(late.nodes) == {"b"}
    assert num_skipped() > before
    assert "node a was skipped" in caplog.text
    # One that reads everything again keeps what it has.
    mirror._follower.suspects |= {"a", "b"}
    await until(lambda: asyncio.sleep(0.001, not mirror._follower.suspects))
    assert await mirror.check() == 0
    assert mirror.longest_prefix(chain(9)) == {"a": 5, "b": 5}
    # Commands.
    assert set(await index.nodes()) == ({"a", "b"} if "log" in request.node.callspec.id else {"b"})
    assert "b" in await index.snapshot()
    # A node that registers again replaces it, and both mirrors follow.
    await nodes["a"].kill()
    await nodes["a"].start()
    nodes["a"].hold(7)
    await nodes["a"].settled()
    for each in (mirror, late):
        await each.caught_up()
        assert each.longest_prefix(chain(9)) == {"a": 7, "b": 5}
    await late.close()


async def test_a_corrupt_batch(
    index: KVIndex,
    redis: Any,
    nodes: dict[str, FakeNode],
    mirror: IndexMirror,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = encode({}, chain(5)[4:])
    await index.publish_changes("a", 1, good + b"\x07\xff")  # to the log and the stream
    await mirror.caught_up()
    late = IndexMirror(index, lease_ttl_s=10.0, tick_s=0.02)
    await late.start()
    for each in (mirror, late):
        # What is before the first wrong byte counts, in mirrors and in their comparison.
        assert each.longest_prefix(chain(9)) == {"a": 4, "b": 5}
        assert await each.check() == 0
    assert len((await index.snapshot())["a"]) == 4

    async def ask(record: NodeRecord) -> dict[Any, Any]:
        return dict(nodes[record.node_id].held)

    assert not any(any(finding.differences[1:]) for finding in await verify(index, {}, ask=ask, settle_s=0))
    assert "a batch in the log of node a was skipped" in caplog.text
    await late.close()


async def test_a_node_with_a_corrupt_log_registers_again(
    index: KVIndex, redis: Any, nodes: dict[str, FakeNode], mirror: IndexMirror
) -> None:
    node, task = nodes["a"], nodes["a"].publisher._task
    await redis.rpush(LOG, b"\x07\xff")
    # Tidying its log, it comes across it.
    node.publisher._log_blocks = 1 << 20
    node.hold(7)
    await until(lambda: asyncio.sleep(0.001, node.publisher._log_blocks < 1 << 20))
    await node.settled()
    assert node.publisher._task is task
    assert task is not None
    assert not task.done()
    await mirror.caught_up()
    assert mirror.longest_prefix(chain(9)) == {"a": 7, "b": 5}
    assert await mirror.check() == 0


EVENTS: dict[str, dict[str, bytes]] = {
    "no fields": {"x": b""},
    "an epoch that is none": {"k": b"H", "n": b"a", "e": b"x", "d": b""},
    "a node that is no text": {"k": b"L", "n": b"\xff", "e": b"1", "d": b""},
    "a reason that is no text": {"k": b"L", "n": b"zz", "e": b"1", "d": b"\xff"},
    "a record": {"k": b"J", "n": b"c", "e": b"1", "d": b"nothing"},
    "a record of another node": {"k": b"H", "n": b"a", "e": b"1", "d": NodeRecord("b", 1, "x").to_json()},
    "a batch": {"k": b"B", "n": b"a", "e": b"1", "d": b"\x07\xff"},
    "a kind of later versions": {"k": b"Z", "n": b"a", "e": b"1", "d": b""},
}


def sealed(index: KVIndex, fields: dict[str, bytes]) -> bytes:
    """The event's data as node a would have sealed it."""
    own = index._registered["a"]
    try:
        return index._entries._seal(fields["k"], own, fields["d"], own.position)
    except (KeyError, struct.error):
        return b""


@pytest.mark.parametrize("fields", EVENTS.values(), ids=EVENTS.keys())
async def test_a_corrupt_event(
    index: KVIndex, redis: Any, nodes: dict[str, FakeNode], mirror: IndexMirror, fields: dict[str, bytes]
) -> None:
    before = num_skipped()
    for data in (fields.get("d", b""), sealed(index, fields)):
        seq = await redis.hincrby("{test}:meta", "seq", 1)
        await redis.xadd("{test}:events", {**fields, "d": data}, id=f"{seq}-0")
    nodes["b"].hold(8)
    await nodes["b"].settled()
    await mirror.caught_up()
    assert mirror.longest_prefix(chain(9)) == {"a": 5, "b": 8}
    assert mirror.nodes.keys() == {"a", "b"}
    assert num_skipped() > before


NOBODY = NodeRecord("a", 7, "decode", profile={"prefill_base_s": 0.5}, links={"b": 1e9}, load=NodeLoad(1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300, "1", None, [], True])
@pytest.mark.parametrize("field", ["unix_s", "profile", "links", "load", "tiers"])
def test_numbers_of_a_record_are_in_range(field: str, value: object) -> None:
    body = orjson.loads(NOBODY.to_json())
    body[field] = {
        "profile": {"prefill_base_s": value},
        "links": {"b": value},
        "load": {"num_running": value},
        "tiers": {"host": {"num_blocks": value, "num_held": 0}},
    }.get(field, value)
    text = orjson.dumps(body)
    if value in (math.inf, -math.inf) or value != value:
        text = text.replace(b"null", b"1e999" if value == math.inf else b"NaN")
    with pytest.raises(RecordCorrupt, match="cannot be read"):
        NodeRecord.from_json(text)


@pytest.mark.slow
@given(st.data())
def test_any_bytes_are_a_record_or_refused(data: st.DataObject) -> None:
    """A record with any field replaced by any JSON."""
    body = orjson.loads(replace(NOBODY, links={}).to_json())
    leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    anything = st.recursive(
        leaves, lambda part: st.lists(part) | st.dictionaries(st.text(max_size=8), part), max_leaves=5
    )
    body[data.draw(st.sampled_from(sorted(body)))] = data.draw(anything)
    try:
        text = orjson.dumps(body)
    except orjson.JSONEncodeError:
        return  # a lone surrogate
    try:
        record = NodeRecord.from_json(text)
    except RecordCorrupt:
        return
    assert NodeRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("value", [b"", b"x", b"1 2", b"1 0 ff \xff\xff", b"x y z w", b"1 0 ff "])
async def test_a_corrupt_record_of_an_object(index: KVIndex, redis: Any, value: bytes) -> None:
    """It is no object, others are found, and a put replaces it."""
    records = Records(index, restoring_s=1.0)
    good, bad = bytes(16), bytes(15) + b"\x01"  # of one bucket

    def record(key: bytes) -> tuple[store_pb2.ObjectRecord, int]:
        info = store_pb2.ObjectInfo(key=key, name="an object", storage=7)
        return store_pb2.ObjectRecord(info=info, owner=bytes(16), places=["a"], copies=1), 0

    await records.put([record(good), record(bad)])
    bucket = records._buckets[0].key
    (field,) = [name for name in await redis.hkeys(bucket) if name.endswith(bad)]
    await redis.hset(bucket, field, value)
    before = num_skipped()
    found = await records.read([(bytes(16), good), (bytes(16), bad)])
    assert [each is None for each in found] == [False, True]
    assert len((await records.scan(0))[0]) == 1
    assert num_skipped() > before or not value
    ((_, former),) = await records.put([record(bad)])
    assert former is None
    assert None not in await records.read([(bytes(16), good), (bytes(16), bad)])


async def test_a_corrupt_record_is_named_once_for_each_of_its_states(
    index: KVIndex, redis: Any, nodes: dict[str, FakeNode], caplog: pytest.LogCaptureFixture
) -> None:
    """Not at each comparison of the mirror with Redis, by one that never read it nor by one that did."""
    known = IndexMirror(index, lease_ttl_s=10.0, tick_s=0.01)
    await known.start()
    for number in (1, 2):
        caplog.clear()
        await redis.hset(NODE, "record", b"no record %d" % number)
        before = num_skipped()
        late = IndexMirror(index, lease_ttl_s=10.0, tick_s=0.01)
        await late.start()
        for mirror in (known, late):
            for _ in range(3):
                mirror._follower.suspects |= {"a"}
                await mirror.check()
                await until(lambda mirror=mirror: asyncio.sleep(0.001, not mirror._follower.suspects))
        assert num_skipped() == before + 1
        said = [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
        assert len(said) == 1, said
        assert f"no record {number}" in said[0]
        await late.close()
    await known.close()
