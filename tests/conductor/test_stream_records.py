"""Records of streams in Redis: whole after any failure, unreadable to others, and never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from secrets import token_hex

import pytest

from moonpool.conductor.errors import StreamForged, StreamGone
from moonpool.conductor.requests import stream_records
from moonpool.conductor.requests.stream_records import StreamHead, StreamRecord, StreamRecords
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from tests.cluster.conftest import eventually
from tests.conductor.core_nodes import RedisProcess

HEAD = StreamHead("cmpl-1", 7, "acme", "digest", (1, 2**63), 7.5)


@pytest.fixture
async def index(url: str) -> AsyncIterator[KVIndex]:
    redis = connect(url)
    # Longer than any pause of the machine.
    yield KVIndex(redis, f"streams-{token_hex(4)}", timeout_s=30.0)
    await redis.aclose()


async def test_tokens_are_found_by_another_conductor(index: KVIndex) -> None:
    ours, theirs = StreamRecords(index), StreamRecords(index)
    record = ours.begin(HEAD)
    with pytest.raises(StreamGone):
        await theirs.read(record.token)
    for number in range(3):
        for token_id in range(10 * number, 10 * number + 10):
            record.add(1, token_id, 4)
        record.add(0, 2**31 - 1, 3)
        await ours.flush()
    past = await theirs.read(record.token)
    assert past.head == HEAD
    assert past.tokens == ((2**31 - 1,) * 3, tuple(range(30)))
    assert past.cached == (3, 4)


async def test_a_head_does_not_wait_for_the_tokens_of_others(
    index: KVIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_records, "_PERIOD_S", 3600.0)
    records = StreamRecords(index)
    records.start()
    try:
        for _ in range(3):
            record = records.begin(HEAD)

            async def is_there(record: StreamRecord = record) -> bool:
                with suppress(StreamGone):
                    return (await records.read(record.token)).head == HEAD
                return False

            await eventually(is_there)
            record.add(0, 1, 0)
    finally:
        await records.close()


async def test_a_lost_answer_repeats_no_token_and_lost_entries_come_again(
    index: KVIndex, redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = StreamRecords(index)
    record = records.begin(HEAD)
    record.add(0, 1, 0)
    await records.flush()
    record.add(0, 2, 0)
    monkeypatch.setattr(index, "_timeout_s", 0.3)
    redis.stop()
    try:
        with pytest.raises(IndexUnavailable):
            await records.flush()
    finally:
        redis.resume()
        monkeypatch.undo()
    await records.flush()  # perhaps for the second time
    assert (await records.read(record.token)).tokens[0] == (1, 2)
    await index.command("UNLINK", record.place)
    record.add(0, 3, 0)
    await records.flush()
    await records.flush()
    assert (await records.read(record.token)).tokens[0] == (1, 2, 3)


async def test_what_is_in_redis_is_read_and_changed_by_conductors_alone(index: KVIndex) -> None:
    records = StreamRecords(index)
    first, second = records.begin(HEAD), records.begin(HEAD)
    for record in (first, second):
        record.add(0, 1234567, 0)
    await records.flush()
    (entry,) = await index.command("LRANGE", first.place, 0, -1)
    assert b"1234567" not in entry
    assert b"cmpl-1" not in entry
    assert 0 < await index.command("PTTL", first.place) <= stream_records.RESUME_S * 1000
    # An entry of one stream is none of another.
    (other,) = await index.command("LRANGE", second.place, 0, -1)
    await index.command("RPUSH", first.place, other)
    with pytest.raises(StreamGone):
        await records.read(first.token)
    for token in ("A" * 32, first.token[:31] + "!", ""):
        with pytest.raises(StreamForged):
            await records.read(token)


async def test_records_that_are_too_long_or_have_ended_are_let_go(
    index: KVIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_records, "MAX_TOKENS", 4)
    records = StreamRecords(index)
    long, short = records.begin(HEAD), records.begin(HEAD)
    for token_id in range(5):
        long.add(0, token_id, 0)
    short.add(0, 1, 0)
    short.end()
    await records.flush()
    await records.flush()
    with pytest.raises(StreamGone):
        await records.read(long.token)
    assert (await records.read(short.token)).tokens[0] == (1,)
    assert not records._open


async def test_what_ended_while_redis_is_away_is_let_go(
    index: KVIndex, redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_records, "RESUME_S", 0.2)
    monkeypatch.setattr(index, "_timeout_s", 0.1)
    records, encoded = StreamRecords(index), list[StreamRecord]()
    unwritten = StreamRecord.unwritten

    def counted(record: StreamRecord) -> tuple[bytes, list[int]]:
        encoded.append(record)
        return unwritten(record)

    monkeypatch.setattr(StreamRecord, "unwritten", counted)
    redis.stop()
    try:
        for _ in range(100):
            record = records.begin(HEAD)
            record.add(0, 1, 0)
            record.end()
        going_on = records.begin(HEAD)
        with pytest.raises(IndexUnavailable):
            await records.flush()
        assert 0 < len(encoded) < 100, "the first call that fails is the last"
        async with asyncio.timeout(30):
            while len(records._open) > 1:
                with pytest.raises(IndexUnavailable):
                    await records.flush()
    finally:
        redis.resume()
    assert list(records._open) == [going_on]


async def test_the_task_writes_by_itself(index: KVIndex) -> None:
    records = StreamRecords(index)
    records.start()
    try:
        record = records.begin(HEAD)
        record.add(0, 5, 0)
        async with asyncio.timeout(30):
            while not await index.command("LLEN", record.place):  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(0.01)
    finally:
        await records.close()
