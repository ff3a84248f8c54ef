"""Hints on their way from a request to its nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.observing.scheduling_metrics import cache_hints
from moonpool.conductor.request import CacheHint
from moonpool.kvstore.blocks.keys import unpack
from moonpool.protos import node_pb2
from tests.conductor.core_nodes import (
    MODEL,
    PROMPT,
    Cluster,
    RedisProcess,
    ScriptedNode,
    continuation,
    request,
    running,
)

Called = list[tuple[str, Any]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """(node, request) of each hint and each copy."""
    seen: Called = []

    async def hint(self: ScriptedNode, asked: node_pb2.HintRequest, context: Any) -> node_pb2.HintReply:
        seen.append((self.node_id, asked))
        return node_pb2.HintReply(num_blocks=len(asked.keys) // 16)

    async def copy(self: ScriptedNode, asked: node_pb2.ReplicateRequest, context: Any) -> Any:
        seen.append((self.node_id, asked))
        return node_pb2.ReplicateReply()

    monkeypatch.setattr(ScriptedNode, "Hint", hint)
    monkeypatch.setattr(ScriptedNode, "Replicate", copy)
    return seen


@pytest.fixture
async def cluster(redis: RedisProcess, called: Called) -> AsyncIterator[Cluster]:
    async with running(redis.url, "p0", "d0", namespace="hints", replicate_nbytes_per_s=0) as cluster:
        yield cluster


async def until(called: Called, count: int) -> None:
    async with asyncio.timeout(60):
        while len(called) < count:  # noqa: ASYNC110 (it waits for other tasks)
            await asyncio.sleep(0.001)


async def test_both_nodes_are_told_after_the_answer_is_copied(cluster: Cluster, called: Called) -> None:
    client = Tenant("acme", cached_nbytes=1 << 20)
    asked = request(cache_hint=CacheHint(pin_s=30.0, prefetch=True), client=client, tenant=client.salt(""))
    tokens = await cluster.generate(asked)
    await until(called, 3)
    (copier, copied), *told = called
    assert (copier, copied.source.node_id, copied.surplus) == ("p0", "d0", False)
    assert [name for name, _ in told] == ["p0", "d0"]
    for _, hint in told:
        assert (hint.keep_s, hint.drop, hint.tenant, hint.tenant_cached_nbytes) == (
            30,
            False,
            "acme",
            1 << 20,
        )
        # The KV of the last token is not computed.
        assert len(unpack(hint.keys)) == (len(PROMPT) + len(tokens) - 1) // MODEL.block_size


async def test_a_stream_that_a_stop_string_ends_keeps_its_hint(cluster: Cluster, called: Called) -> None:
    async with aclosing(cluster.conductor.generate(request(cache_hint=CacheHint(drop_after=True)))) as stream:
        async for event in stream:
            if event.index == 3:
                break
    await until(called, 2)
    assert {name for name, hint in called if hint.drop} == {"p0", "d0"}


async def test_without_a_hint_nothing_is_sent(cluster: Cluster, called: Called) -> None:
    await cluster.generate(request("a"))
    await cluster.generate(request("b", cache_hint=CacheHint()))
    await cluster.generate(request("c", cache_hint=CacheHint(pin_s=1.0)))
    await until(called, 2)
    assert len(called) == 2


async def test_a_hint_that_fails_is_counted_and_ends_no_request(redis: RedisProcess) -> None:
    failed = cache_hints.labels("failed")
    before = failed._value.get()
    # These nodes do not know the call, as nodes of an earlier version.
    async with running(redis.url, "p0", "d0", namespace="old", replicate_nbytes_per_s=0) as cluster:
        tokens = await cluster.generate(request(cache_hint=CacheHint(pin_s=1.0)))
        assert tokens == continuation(PROMPT, 8)
        await cluster.until(lambda: failed._value.get() == before + 1)
