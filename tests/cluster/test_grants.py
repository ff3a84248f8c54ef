"""What a prefill node granted to a follower stays, whatever becomes of their connection."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from moonpool.kvstore.grants.held import HeldGrant, holders_clock
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import AgentDescriptor, GrantLapsed, Span, TransferAgent
from tests.cluster.conftest import another, channel_as, eventually, started
from tests.cluster.test_tiers import prefill_of, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_BLOCKS = 40  # of a prompt; the pool has room for two and some


@pytest.mark.slow
async def test_blocks_stay_for_a_follower_whose_stream_broke_until_its_grant_ends(
    cluster: LocalCluster,
) -> None:
    async with rpc.channel(str(cluster.children["prefill-0"].ready["rpc_address"])) as channel:
        kv = (await node_pb2_grpc.NodeStub(channel).Status(node_pb2.StatusRequest())).kv
    nbytes, num_tokens = kv.block_nbytes, NUM_BLOCKS * cluster.config.engine.block_size
    options = (f"engine.pool_nbytes={96 * nbytes}", "store.lease_ttl_s=5", "store.host.capacity_nbytes=1MiB")
    child = another(cluster, "prefill-granting", "prefill", *options)
    async with (
        started(child),
        AsyncExitStack() as stack,
        await TransferAgent.start(TransferOptions(), agent_id="follower", epoch=1) as agent,
    ):
        conductor, follower = [
            await stack.enter_async_context(channel_as(role, cluster, str(child.ready["rpc_address"])))
            for role in ("conductor", "node")
        ]
        node, prefill = node_pb2_grpc.NodeStub(follower), node_pb2_grpc.PrefillNodeStub(conductor)

        async def num_used() -> int:
            return (await node.Status(node_pb2.StatusRequest())).tiers[0].num_used_blocks

        asked_s = holders_clock()
        request = node_pb2.FollowRequest(request_id="held", follower="a test")
        follow = node_pb2_grpc.PrefillNodeStub(follower).Follow(request)
        await prefill.Prefill(prefill_of("held", prompt_of(num_tokens, seed=1), followed=True))
        source: node_pb2.KvAddress | None = None
        theirs: list[Span] = []
        checksums: list[int] = []
        async for chunk in follow:
            source = source or chunk.source
            blocks = chunk.blocks
            theirs += [Span(*at, nbytes) for at in zip(blocks.region, blocks.offset, strict=True)]
            checksums += blocks.checksum
            held = HeldGrant("the node", asked_s, chunk.granted_s)
            if chunk.last:
                break
        follow.cancel()  # as the node sees it, the connection broke
        assert source is not None
        for seed in range(2, 6):
            await prefill.Prefill(prefill_of(f"other-{seed}", prompt_of(num_tokens, seed=seed)))
        assert await num_used() >= NUM_BLOCKS
        copy = agent.allocate(len(theirs) * nbytes, "copy")
        peer = await agent.connect(AgentDescriptor.unpack(source.agent))
        ours = [Span(copy.id, number * nbytes, nbytes) for number in range(len(theirs))]
        with held.within(10.0) as limit_s:
            await peer.read(ours, theirs, deadline_s=limit_s, checksums=checksums)

        async def all_free() -> bool:
            return await num_used() == 0

        await eventually(all_free, timeout_s=30)
        with pytest.raises(GrantLapsed), held.within(10.0):
            raise AssertionError("its blocks may be others' now")
