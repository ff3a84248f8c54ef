"""A node whose wall clock is a day ahead or behind: deadlines of requests do not go by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from moonpool.kvstore.blocks.keys import pack
from moonpool.node.node import ComputeNode
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.service.lifecycle import ServiceContext
from tests.prefill_node.test_life import config_of, serving

DAY_S = 86_400.0
NUM_TOKENS, MAX_TOKENS = 40, 4

Stubs = tuple[node_pb2_grpc.PrefillNodeStub, node_pb2_grpc.DecodeNodeStub]


def work_of(name: str, left_s: float) -> node_pb2.Work:
    return node_pb2.Work(
        request_id=name,
        token_ids=np.arange(1, NUM_TOKENS + 1, dtype="<i4").tobytes(),
        num_prompt_tokens=NUM_TOKENS,
        root_key=bytes(16),
        block_keys=pack([]),
        sampling=node_pb2.Sampling(max_tokens=MAX_TOKENS, ignore_eos=True),
        left_s=left_s,
    )


@asynccontextmanager
async def jumped(by_s: float) -> AsyncIterator[tuple[ComputeNode, *Stubs]]:
    node, context = ComputeNode(config_of(), "both"), ServiceContext("both")
    node.clock = lambda: time.time() + by_s
    async with serving(node, context) as prefill, rpc.channel(node.rpc_address) as channel:
        yield node, prefill, node_pb2_grpc.DecodeNodeStub(channel)
        context.draining.set()


async def told(decode: node_pb2_grpc.DecodeNodeStub) -> list[node_pb2.TokenOut]:
    """All messages of one request, to its end."""
    found: list[node_pb2.TokenOut] = []
    async with asyncio.timeout(60):
        async for step in decode.Tokens(node_pb2.TokensRequest(conductor_id="c")):
            found += step.tokens
            if found and found[-1].finish_reason:
                return found
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("by_s", [DAY_S, -DAY_S])
@pytest.mark.parametrize("left_s", [60.0, 0.0])  # 0: of a conductor that does not say it
async def test_a_wall_clock_that_is_wrong_ends_no_request(by_s: float, left_s: float) -> None:
    async with jumped(by_s) as (node, prefill, decode):
        telling = asyncio.create_task(told(decode))
        work = work_of("r", left_s)
        request = node_pb2.DecodeRequest(work=work, conductor_id="c", prefill_address=node.rpc_address)
        await decode.Decode(request)
        first = await prefill.Prefill(node_pb2.PrefillRequest(work=work, followed=True))
        assert first.token.has_token
        tokens = [token for token in await telling if token.has_token]
        assert [token.index for token in tokens] == [1, 2, 3]
        assert tokens[-1].finish_reason == node_pb2.FINISH_LENGTH


@pytest.mark.parametrize("by_s", [0.0, -DAY_S])
async def test_a_deadline_passes_whatever_the_wall_clock_says(by_s: float) -> None:
    async with jumped(by_s) as (node, _, decode):
        telling = asyncio.create_task(told(decode))
        work = work_of("late", 0.2)
        # Nobody computes its prompt.
        await decode.Decode(
            node_pb2.DecodeRequest(work=work, conductor_id="c", prefill_address=node.rpc_address)
        )
        (last,) = await telling
        assert last.finish_reason == node_pb2.FINISH_ERROR
        assert "deadline" in last.error
        assert node.num_requests() == 0
