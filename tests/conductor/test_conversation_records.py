"""Conversations of the Responses API in Redis: continued at any conductor, by their tenant alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex

import pytest

from moonpool.conductor.api.responses.conversations import Conversations
from moonpool.conductor.requests import conversation_records
from moonpool.conductor.requests.conversation_records import ConversationRecords
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.acl import redis_users
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.runtime.config.options import ConductorOptions
from tests.conductor.conftest import prompt_of, serving
from tests.conductor.core_nodes import RedisProcess

MESSAGES = [{"role": "user", "content": "where is the treasure?"}, {"role": "assistant", "content": "世"}]


@asynccontextmanager
async def index_at(url: str, timeout_s: float) -> AsyncIterator[KVIndex]:
    redis = connect(url)
    try:
        yield KVIndex(redis, f"responses-{token_hex(4)}", timeout_s=timeout_s)
    finally:
        await redis.aclose()


@pytest.fixture
async def index(url: str) -> AsyncIterator[KVIndex]:
    # Longer than any pause of the machine: what Redis did not say in time is kept by one conductor only.
    async with index_at(url, 30.0) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
async def test_another_conductor_continues(index: KVIndex, checkpoint: Path, stream: bool) -> None:
    async with serving(checkpoint, ConductorOptions(port=0)) as ours:
        ours.context.conversations = Conversations(ConversationRecords(index))
        async with serving(checkpoint, ConductorOptions(port=0)) as theirs:
            theirs.context.conversations = Conversations(ConversationRecords(index))
            asked = {"input": "Hi", "stream": stream}
            async with ours.client.post(f"{ours.url}/v1/responses", json=asked) as response:
                body = await response.text()
            assert response.status == 200, body
            name = body[body.index("resp_") :].partition('"')[0]
            status, answer = await theirs.post("/v1/responses", {"input": "On", "previous_response_id": name})
            assert status == 200, answer
            assert "<|user|>Hi<|eos|><|assistant|>Hello, world.<|eos|><|user|>On<|eos|>" in prompt_of(theirs)
            status, answer = await theirs.post(
                "/v1/responses", {"input": "On", "previous_response_id": "resp_0"}
            )
            assert (status, answer["error"]["code"]) == (404, "previous_response_not_found")


async def test_without_redis_a_conductor_knows_its_own(
    url: str, checkpoint: Path, redis: RedisProcess
) -> None:
    async with index_at(url, 0.3) as index, serving(checkpoint, ConductorOptions(port=0)) as api:
        api.context.conversations = Conversations(ConversationRecords(index))
        redis.stop()
        try:
            status, answer = await api.post("/v1/responses", {"input": "Hi"})
            assert status == 200, answer
            body = {"input": "On", "previous_response_id": answer["id"]}
            assert (await api.post("/v1/responses", body))[0] == 200
            status, answer = await api.post("/v1/responses", body | {"previous_response_id": "resp_0"})
            assert (status, answer["error"]["code"]) == (503, "responses_unknown")
        finally:
            redis.resume()


async def test_other_tenants_and_readers_of_redis_learn_nothing(index: KVIndex) -> None:
    records = ConversationRecords(index)
    for name in ("resp_1", "resp_2"):
        assert await records.put("acme", name, MESSAGES)
    assert await records.get("acme", "resp_1") == MESSAGES
    assert await records.get("other", "resp_1") is None
    place = records._place("acme")
    entry = await index.command("HGET", place, "resp_1")
    assert b"treasure" not in entry
    assert "acme" not in place
    assert 0 < await index.command("PTTL", place) <= conversation_records.KEEP_S * 1000
    # An entry of one response or tenant is none of another.
    await index.command("HSET", place, "resp_2", entry)
    assert await records.get("acme", "resp_2") is None
    await index.command("HSET", records._place("other"), "resp_1", entry)
    assert await records.get("other", "resp_1") is None


async def test_each_tenant_has_bounds_of_its_own(index: KVIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    records = ConversationRecords(index)
    assert not await records.put("acme", "long", [{"content": "x" * (1 << 20)}])
    monkeypatch.setattr(conversation_records, "MAX_KEPT", 2)
    await records.put("other", "a", MESSAGES)
    for name in "abc":
        await records.put("acme", name, MESSAGES)
        await asyncio.sleep(0.002)  # Redis orders them by the millisecond
    assert await records.get("acme", "a") is None
    assert await records.get("acme", "c") == MESSAGES
    assert await records.get("other", "a") == MESSAGES
    monkeypatch.setattr(conversation_records, "MAX_NBYTES", 200)
    await records.put("acme", "d", [{"content": token_hex(100)}])
    assert await index.command("HLEN", records._place("acme")) == 0
    monkeypatch.setattr(conversation_records, "MAX_NBYTES", 1 << 20)
    monkeypatch.setattr(conversation_records, "KEEP_S", -1.0)
    await records.put("acme", "e", MESSAGES)
    assert await records.get("acme", "e") is None


async def test_a_cancelled_handler_still_keeps_it(index: KVIndex) -> None:
    ours, theirs = (Conversations(ConversationRecords(index)) for _ in range(2))
    task = asyncio.create_task(ours.put("acme", "resp_1", MESSAGES))
    await asyncio.sleep(0)
    task.cancel()
    await ours.written()
    assert await theirs.get("acme", "resp_1") == MESSAGES


async def test_a_conductors_user_of_redis_may(url: str, index: KVIndex) -> None:
    admin = connect(url)
    users = {user.role: user for user in redis_users(url, index.namespace)}
    for role in ("conductor", "node"):
        _, name, *rules = users[role].line.split()
        await admin.execute_command("ACL", "SETUSER", name, *rules)
        redis = connect(users[role].url)
        records = ConversationRecords(KVIndex(redis, index.namespace))
        if role == "conductor":
            assert await records.put("acme", "resp_1", MESSAGES)
            assert await records.get("acme", "resp_1") == MESSAGES
        else:
            with pytest.raises(IndexUnavailable, match="permission"):
                await records.get("acme", "resp_1")
        await redis.aclose()
        await admin.execute_command("ACL", "DELUSER", name)
    await admin.aclose()
