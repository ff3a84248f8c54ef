"""A follower that comes when the blocks of its prompt are kept no longer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
import pytest

from moonpool.engine.node.handover import HandoverFailed
from moonpool.engine.node.messages import sequence_of
from moonpool.node.node import ComputeNode
from moonpool.protos import node_pb2
from moonpool.runtime.service.lifecycle import ServiceContext
from tests.prefill_node.test_life import config_of, serving
from tests.prefill_node.test_load_times import prefill_of


@pytest.mark.parametrize("here", [False, True])
async def test_a_follower_that_comes_too_late_is_told_so(here: bool) -> None:
    """It would wait until its request's deadline otherwise: for room for an adapter it may wait long before
    it follows. ``here``: on the same node."""
    config = config_of()
    config = replace(config, store=replace(config.store, lease_ttl_s=0.1))
    node, context = ComputeNode(config, "both"), ServiceContext("both")
    async with serving(node, context) as stub:
        request = prefill_of("late")
        request.followed = True
        await stub.Prefill(request)
        while node.num_requests():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        sequence = sequence_of(request.work, arrived_s=0.0)
        follow = node_pb2.FollowRequest(request_id="late", follower="decode-0")
        late = node.prefilled_here(sequence) if here else anext(aiter(stub.Follow(follow)))
        with pytest.raises((grpc.aio.AioRpcError, HandoverFailed), match="not taken in time"):
            await asyncio.wait_for(late, 50)
        assert not node._handovers and not sequence.block_table
        node.engine.pool.check_integrity()
        context.draining.set()
