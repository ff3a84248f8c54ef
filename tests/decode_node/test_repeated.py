"""A key that comes twice: each request keeps its own entry."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc.aio

from moonpool.node.node import ComputeNode
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.service.lifecycle import ServiceContext
from tests.prefill_node.test_life import config_of, serving
from tests.prefill_node.test_load_times import prefill_of

NUM_TOKENS = 500


async def test_a_repeated_call_takes_nothing_from_the_request_that_runs() -> None:
    node, context = ComputeNode(config_of(), "both"), ServiceContext("both")
    async with serving(node, context) as prefills, rpc.channel(node.rpc_address) as channel:
        decodes, prefill = node_pb2_grpc.DecodeNodeStub(channel), prefill_of("twice")
        prefill.followed = True
        prefill.work.sampling.max_tokens = NUM_TOKENS
        await prefills.Prefill(prefill)
        decode = node_pb2.DecodeRequest(work=prefill.work, conductor_id="c", prefill_address=node.rpc_address)
        await decodes.Decode(decode)
        decode.prefill_address = "127.0.0.1:1"  # nobody has the blocks by now
        told: list[node_pb2.TokenOut] = []
        again: asyncio.Future[object] | None = None
        async with asyncio.timeout(60):
            async for message in decodes.Tokens(node_pb2.TokensRequest(conductor_id="c")):
                told += message.tokens
                if again is None and any(token.has_token for token in told):
                    again = asyncio.gather(decodes.Decode(decode), return_exceptions=True)
                if told and told[-1].finish_reason:
                    break
        assert again is not None
        (answer,) = await again  # type: ignore[misc]
        assert (told[-1].error, told[-1].finish_reason) == ("", node_pb2.FINISH_LENGTH)
        assert [token.index for token in told if token.has_token] == list(range(1, NUM_TOKENS))
        assert isinstance(answer, grpc.aio.AioRpcError)
        assert answer.code() is grpc.StatusCode.ALREADY_EXISTS
        assert not node.num_requests()
        node.engine.pool.check_integrity()
        context.draining.set()


async def test_a_cancelled_request_forgets_no_later_one_of_its_key() -> None:
    node, context = ComputeNode(config_of(), "both"), ServiceContext("both")
    async with serving(node, context):
        work, key = prefill_of("later").work, ("later", 0)
        decode = node_pb2.DecodeRequest(work=work, conductor_id="c", prefill_address=node.rpc_address)
        await node.Decode(decode, cast(Any, None))
        first = node._requests[key].takeover
        await asyncio.sleep(0)  # it has begun
        node.cancel(key)
        await node.Decode(decode, cast(Any, None))
        await asyncio.wait((first,))
        assert key in node._requests
        node.cancel(key)
        context.draining.set()
