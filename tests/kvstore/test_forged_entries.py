"""Who can write to Redis without the cluster's key changes nothing of what mirrors and nodes believe."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.coordination.other_conductors import OtherConductors
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import EntryRefused
from moonpool.kvstore.index import metrics
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.changes import encode
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.kvstore.index.redis.seal import Seals
from moonpool.kvstore.objects.records import Records
from moonpool.protos import store_pb2
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import process
from moonpool.runtime.security.call_tokens import RoleKeys
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.kvstore.nodes import FakeNode, chain
from tests.kvstore.redis_servers import until

TTL_S = 60.0


def refused(reason: str) -> float:
    return float(metrics.skipped_entries.labels(reason)._value.get())


async def event(redis: Any, kind: bytes, node: str, epoch: int, data: bytes) -> None:
    """Append to the stream, as a script would."""
    seq = await redis.hincrby("{test}:meta", "seq", 1)
    await redis.xadd("{test}:events", {"k": kind, "n": node, "e": epoch, "d": data}, id=f"{seq}-0")


async def last_event(redis: Any, kind: bytes) -> bytes:
    """The data of the newest event of a kind, as an eavesdropper keeps it."""
    found = [fields[b"d"] for _, fields in await redis.xrange("{test}:events") if fields[b"k"] == kind]
    return bytes(found[-1])


async def found_by(index: KVIndex, mirror: IndexMirror) -> list[dict[str, int]]:
    """What a mirror that followed and one that reads everything now find, after both looked again."""
    late = IndexMirror(index, lease_ttl_s=TTL_S, tick_s=0.02)
    await late.start()
    mirror._follower.suspects |= {"a", "b", "evil"}
    await until(lambda: asyncio.sleep(0.001, not mirror._follower.suspects))
    found = []
    for each in (mirror, late):
        await each.caught_up()
        found.append(dict(each.longest_prefix(chain(9))))
    await late.close()
    return found


@pytest.mark.parametrize("key", ["none", "of another cluster"])
async def test_a_spoofed_node_is_no_node(
    index: KVIndex, redis: Any, mirror: IndexMirror, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = refused("forged")
    record = NodeRecord("evil", 1, "prefill", rpc_address="10.6.6.6:1")
    if key == "none":
        await redis.hset("{test}:node:evil", mapping={"epoch": 1, "record": record.to_json(), "base": 1})
        await redis.zadd("{test}:leases", {"evil": 9e15})
        await event(redis, b"J", "evil", 1, record.to_json())
    else:
        stranger = KVIndex(redis, "test", seals=Seals(b"the key of another cluster......"))
        await stranger.register(record, TTL_S)
        await stranger.publish("evil", 1, [(key, Tier.POOL) for key in chain(9)])
    assert await found_by(index, mirror) == [{"a": 5, "b": 5}] * 2
    assert mirror.nodes.keys() == (await index.nodes()).keys() == {"a", "b"}
    assert refused("forged") > before
    assert "node evil was skipped: no process with our" in caplog.text


async def test_a_forged_heartbeat_sends_nobody_elsewhere(
    index: KVIndex, redis: Any, mirror: IndexMirror
) -> None:
    await event(redis, b"H", "a", 1, NodeRecord("a", 1, "prefill", rpc_address="10.6.6.6:1").to_json())
    await event(redis, b"L", "b", 1, b"left")
    await mirror.caught_up()
    assert mirror.nodes["a"].rpc_address == ""
    assert "b" in mirror.nodes


async def test_a_forged_batch_is_of_no_node(index: KVIndex, redis: Any, mirror: IndexMirror) -> None:
    before = refused("forged")
    batch = encode(dict.fromkeys(chain(9), Tier.POOL), ())
    await redis.rpush("{test}:log:a", batch)
    await event(redis, b"B", "a", 1, batch)
    assert await found_by(index, mirror) == [{"a": 5, "b": 5}] * 2
    assert await mirror.check() == 0
    assert refused("forged") > before


async def test_a_batch_of_another_node_is_refused(
    index: KVIndex, redis: Any, nodes: dict[str, FakeNode], mirror: IndexMirror
) -> None:
    nodes["a"].hold(9)
    await nodes["a"].settled()
    batch = await last_event(redis, b"B")
    await redis.rpush("{test}:log:b", batch)
    await event(redis, b"B", "b", 1, batch)
    assert await found_by(index, mirror) == [{"a": 9, "b": 5}] * 2


async def test_an_old_batch_is_noticed(
    index: KVIndex, redis: Any, nodes: dict[str, FakeNode], mirror: IndexMirror
) -> None:
    nodes["a"].hold(9)
    await nodes["a"].settled()
    batch, before = await last_event(redis, b"B"), refused("replayed")
    nodes["a"].hold(3)
    await nodes["a"].settled()
    await event(redis, b"B", "a", 1, batch)
    await mirror.caught_up()
    assert refused("replayed") == before + 1
    await redis.rpush("{test}:log:a", batch)
    assert await found_by(index, mirror) == [{"a": 3, "b": 5}] * 2
    assert refused("replayed") > before + 1
    nodes["a"].hold(4)  # its log is longer than it knows
    await nodes["a"].settled()
    assert await found_by(index, mirror) == [{"a": 4, "b": 5}] * 2
    assert await mirror.check() == 0


async def test_an_old_record_is_noticed(
    index: KVIndex, redis: Any, nodes: dict[str, FakeNode], mirror: IndexMirror
) -> None:
    old, before = await redis.hget("{test}:node:a", "record"), refused("replayed")
    nodes["a"].record = NodeRecord("a", 1, "prefill", rpc_address="new:1")
    await nodes["a"].settled()
    await event(redis, b"H", "a", 1, old)
    await mirror.caught_up()
    assert mirror.nodes["a"].rpc_address == "new:1"
    assert refused("replayed") == before + 1


async def test_an_old_epoch_is_noticed(
    index: KVIndex, redis: Any, nodes: dict[str, FakeNode], mirror: IndexMirror
) -> None:
    """By who saw the new one at once, by others once the old record is no longer valid."""
    joined, old = await last_event(redis, b"J"), await redis.hgetall("{test}:node:b")
    log, before = await redis.lrange("{test}:log:b", 0, -1), refused("replayed")
    await nodes["b"].kill()
    nodes["b"] = await FakeNode(index, "b", epoch=2, lease_ttl_s=TTL_S).start()
    nodes["b"].hold(2)
    await nodes["b"].settled()
    await event(redis, b"J", "b", 1, joined)
    await mirror.caught_up()
    assert refused("replayed") == before + 1
    assert (mirror.nodes["b"].epoch, mirror.longest_prefix(chain(9))) == (2, {"a": 5, "b": 2})
    await nodes["b"].kill()
    await redis.hset("{test}:node:b", mapping=old)
    await redis.delete("{test}:log:b")
    await redis.rpush("{test}:log:b", *log)
    mirror._follower.suspects.add("b")
    await until(lambda: asyncio.sleep(0.001, not mirror._follower.suspects))
    assert mirror.nodes["b"].epoch == 2
    later = KVIndex(redis, "test", unix_clock=lambda: time.time() + TTL_S + 31)
    before = refused("expired")
    assert "b" not in await later.nodes()
    assert refused("expired") > before


async def test_who_left_does_not_come_back_and_who_came_back_does_not_leave(
    index: KVIndex, redis: Any, nodes: dict[str, FakeNode], mirror: IndexMirror
) -> None:
    joined, kept = await last_event(redis, b"J"), await redis.hgetall("{test}:node:b")
    await nodes["b"].publisher.close()
    await until(lambda: asyncio.sleep(0.001, "b" not in mirror.nodes))
    left = await last_event(redis, b"L")
    await event(redis, b"J", "b", 1, joined)
    await redis.hset("{test}:node:b", mapping=kept)
    await redis.zadd("{test}:leases", {"b": 9e15})
    mirror._follower.suspects.add("b")
    await until(lambda: asyncio.sleep(0.001, not mirror._follower.suspects))
    await mirror.caught_up()
    assert "b" not in mirror.nodes
    await nodes["b"].start()
    await event(redis, b"L", "b", 1, left)
    await nodes["b"].settled()
    await mirror.caught_up()
    assert mirror.longest_prefix(chain(9)) == {"a": 5, "b": 5}


async def test_a_lease_that_somebody_prolongs_ends_with_the_record(
    redis: Any, nodes: dict[str, FakeNode]
) -> None:
    ahead_s = 0.0
    index = KVIndex(redis, "test", unix_clock=lambda: time.time() + ahead_s)
    mirror = IndexMirror(index, lease_ttl_s=0.5, tick_s=0.02)
    await mirror.start()
    await nodes["b"].kill()
    await redis.zadd("{test}:leases", {"b": 9e15})
    ahead_s = TTL_S + 31 - 5  # a's record is renewed, as by its own clock
    nodes["a"].publisher._ttl_s = 10 * TTL_S
    await nodes["a"].settled()
    ahead_s += 5
    await until(lambda: asyncio.sleep(0.001, "b" not in mirror.nodes))
    assert mirror.nodes.keys() == {"a"}
    await mirror.close()


async def test_a_node_that_died_while_no_mirror_ran_does_not_stay_in_redis(
    index: KVIndex, redis: Any, nodes: dict[str, FakeNode], mirror: IndexMirror
) -> None:
    await nodes["b"].kill()
    nodes["b"] = await FakeNode(index, "b", epoch=2, lease_ttl_s=0.5).start()
    nodes["b"].hold(5)
    await nodes["b"].settled()
    await nodes["b"].kill()
    await redis.zadd("{test}:leases", {"without a record": 1})
    # One that starts when the record has expired, and never knows the node.
    later = KVIndex(redis, "test", unix_clock=lambda: time.time() + 60)
    late = IndexMirror(later, lease_ttl_s=0.5, tick_s=0.02)
    await late.start()
    assert late.nodes.keys() == {"a"}

    async def swept() -> bool:
        return await index.node_ids() == ["a"] and not await redis.keys("{test}:*:b")

    await until(swept)
    await mirror.caught_up()
    assert mirror.nodes.keys() == {"a"}
    await late.caught_up()
    assert late.nodes.keys() == {"a"}
    await late.close()


async def test_others_may_write_to_a_nodes_log_in_turn(
    index: KVIndex, redis: Any, nodes: dict[str, FakeNode], mirror: IndexMirror
) -> None:
    operator = KVIndex(redis, "test")

    async def repair(number: int) -> None:
        await operator.publish("a", 1, removed=chain(5, number)[3:])

    async def hold(number: int) -> None:
        nodes["a"].hold(5, number)
        await nodes["a"].settled()

    await asyncio.gather(*(each(number) for number in range(1, 9) for each in (repair, hold)))
    await nodes["a"].settled()
    await mirror.caught_up()
    assert await mirror.check() == 0
    assert set(mirror.held_by("a")) <= set(nodes["a"].held)


async def test_records_of_objects_are_sealed_for_their_place(index: KVIndex, redis: Any) -> None:
    stranger = Records(KVIndex(redis, "test", seals=Seals(bytes(32))), restoring_s=1.0)
    records = Records(index, restoring_s=1.0)

    def record(number: int, storage: int) -> tuple[store_pb2.ObjectRecord, int]:
        info = store_pb2.ObjectInfo(key=bytes(15) + bytes([number]), name="an object", storage=storage)
        return store_pb2.ObjectRecord(info=info, owner=bytes(16), places=["a"], copies=1), 0

    names = [(bytes(16), bytes(15) + bytes([number])) for number in range(3)]
    await records.put([record(0, 7), record(1, 8)])
    bucket = records._buckets[0].key
    fields = sorted(name for name in await redis.hkeys(bucket) if name != b"generation")
    before = refused("forged")
    # Another object's record, another storage, another cluster's.
    await redis.hset(bucket, fields[1], await redis.hget(bucket, fields[0]))
    version, expires_ms, _, payload = (await redis.hget(bucket, fields[0])).split(b" ", 3)
    await redis.hset(bucket, fields[0], b" ".join((version, expires_ms, b"%016x" % 9, payload)))
    await stranger.put([record(2, 9)])
    assert await records.read(names) == [None] * 3
    assert (await records.scan(0))[0] == []
    assert refused("forged") >= before + 6
    await records.put([record(number, 10 + number) for number in range(3)])
    assert None not in await records.read(names)


async def test_a_forged_conductor_is_not_met(index: KVIndex, redis: Any) -> None:
    met: dict[str, str] = {}

    def conductor(name: str, index: KVIndex) -> OtherConductors:
        each = OtherConductors(index, name, met.update, lease_ttl_s=TTL_S)
        each.facts["peer_address"] = f"{name}:1"
        return each

    one, two = conductor("one", index), conductor("two", index)
    await two._announce()
    old = await redis.hget("{test}:facts", "two")
    await two._announce()
    await conductor("evil", KVIndex(redis, "test", seals=Seals(bytes(32))))._announce()
    await redis.zadd("{test}:conductors", {"raw": 9e15})
    await redis.hset("{test}:facts", "raw", b'{"peer_address": "raw:1"}')
    assert await one._announce() == {"two": {"peer_address": "two:1"}}
    before = refused("replayed")
    await redis.hset("{test}:facts", "two", old)
    assert await one._announce() == {}
    assert refused("replayed") == before + 1


@given(st.binary(max_size=80), st.data())
def test_any_change_breaks_a_seal(body: bytes, data: st.DataObject) -> None:
    seals, about = Seals(bytes(32)), {"epoch": 3, "life": 4, "number": 5}
    sealed = seals.seal(b"B", b"place", body, **about)
    assert seals.open(b"B", b"place", sealed, epoch=3) == (4, 5, body)
    at = data.draw(st.integers(0, len(sealed) - 1))
    other = sealed[:at] + bytes([sealed[at] ^ data.draw(st.integers(1, 255))]) + sealed[at + 1 :]
    for kind, place, written, epoch in (
        (b"B", b"place", other, 3),
        (b"B", b"place", sealed[:at], 3),
        (b"H", b"place", sealed, 3),
        (b"B", b"plac", sealed, 3),
        (b"B", b"place", sealed, 4),
        (b"", b"place", sealed, 3),
        (b"B", b"place", sealed, -1),
        (b"B", b"place", b"", 3),
    ):
        with pytest.raises(EntryRefused, match="cluster_key"):
            seals.open(kind, place, written, epoch=epoch)


def test_the_key_of_seals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cluster's; without one the user's on this machine; the same everywhere where all is open."""
    before = process.current()

    def sealed(machine: str, **options: Any) -> bytes:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / machine))
        process.use(Security(SecurityOptions(**options), Caller("client", "a"), serves=False))
        return Seals().seal(b"H", b"place", b"body")

    try:
        for options, same in (
            ({"cluster_key": "one key of 16 and more"}, True),
            ({"insecure": True}, True),
            ({}, False),
        ):
            assert (sealed("here", **options) == sealed("there", **options)) is same
            assert sealed("here", **options) == sealed("here", **options)
        with pytest.raises(ConfigError, match="a key of role client is not enough for the index in Redis"):
            sealed("here", cluster_key=RoleKeys("one key of 16 and more").text_of("client"))
    finally:
        process.use(before)
