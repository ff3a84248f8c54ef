"""What a prefill node granted to a follower stays, whatever becomes of their connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from moonpool.kvstore.grants.held import HeldGrant, holders_clock
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.service.child import Child
from moonpool.transfer import AgentDescriptor, GrantLapsed, Span, TransferAgent
from tests.cluster.conftest import another, channel_as, eventually, started
from tests.cluster.test_tiers import prefill_of, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_BLOCKS = 40  # of a prompt; the pool of a node of its own has room for two and some


@dataclass
class Node:
    """A prefill node, as a conductor and a follower see it."""

    service: node_pb2_grpc.NodeStub
    prefill: node_pb2_grpc.PrefillNodeStub
    follower: node_pb2_grpc.PrefillNodeStub

    async def num_used(self) -> int:
        return (await self.service.Status(node_pb2.StatusRequest())).tiers[0].num_used_blocks


@dataclass
class Followed:
    """What the follower of a prompt was told, before its stream broke."""

    held: HeldGrant
    source: node_pb2.KvAddress
    spans: list[Span] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)


@asynccontextmanager
async def node_of(cluster: LocalCluster, child: Child) -> AsyncIterator[Node]:
    address = str(child.ready["rpc_address"])
    async with (
        channel_as("conductor", cluster, address) as conductor,
        channel_as("node", cluster, address) as follower,
    ):
        stubs = [node_pb2_grpc.PrefillNodeStub(channel) for channel in (conductor, follower)]
        yield Node(node_pb2_grpc.NodeStub(follower), *stubs)


async def follow_and_break(node: Node, name: str, num_tokens: int, block_nbytes: int) -> Followed:
    """Have the node compute a prompt, follow that to its last block, and take none."""
    asked_s = holders_clock()
    follow = node.follower.Follow(node_pb2.FollowRequest(request_id=name, follower="a test"))
    await node.prefill.Prefill(prefill_of(name, prompt_of(num_tokens, seed=1), followed=True))
    followed: Followed | None = None
    async for chunk in follow:
        held = HeldGrant("the node", asked_s, chunk.granted_s)
        followed = followed or Followed(held, chunk.source)
        followed.held, blocks = held, chunk.blocks
        followed.spans += [Span(*at, block_nbytes) for at in zip(blocks.region, blocks.offset, strict=True)]
        followed.checksums += blocks.checksum
        if chunk.last:
            break
    follow.cancel()  # as the node sees it, the connection broke
    assert followed is not None
    return followed


@pytest.mark.slow
async def test_blocks_stay_for_a_follower_whose_stream_broke(cluster: LocalCluster) -> None:
    async with node_of(cluster, cluster.children["prefill-0"]) as any_node:
        nbytes = (await any_node.service.Status(node_pb2.StatusRequest())).kv.block_nbytes
    num_tokens = NUM_BLOCKS * cluster.config.engine.block_size
    # The grant outlasts all that is computed and read meanwhile, on a busy machine too.
    options = (
        f"engine.pool_nbytes={96 * nbytes}",
        "store.lease_ttl_s=120",
        "store.host.capacity_nbytes=1MiB",
    )
    child = another(cluster, "prefill-granting", "prefill", *options)
    async with (
        started(child),
        node_of(cluster, child) as node,
        await TransferAgent.start(TransferOptions(), agent_id="follower", epoch=1) as agent,
    ):
        followed = await follow_and_break(node, "held", num_tokens, nbytes)
        for seed in range(2, 6):
            await node.prefill.Prefill(prefill_of(f"other-{seed}", prompt_of(num_tokens, seed=seed)))
        assert await node.num_used() >= NUM_BLOCKS
        theirs = followed.spans
        copy = agent.allocate(len(theirs) * nbytes, "copy")
        peer = await agent.connect(AgentDescriptor.unpack(followed.source.agent))
        ours = [Span(copy.id, number * nbytes, nbytes) for number in range(len(theirs))]
        with followed.held.within(30.0) as limit_s:
            await peer.read(ours, theirs, deadline_s=limit_s, checksums=followed.checksums)


@pytest.mark.slow
async def test_blocks_of_a_follower_whose_stream_broke_are_free_when_its_grant_has_ended(
    cluster: LocalCluster,
) -> None:
    async with node_of(cluster, cluster.children["prefill-0"]) as node:
        nbytes = (await node.service.Status(node_pb2.StatusRequest())).kv.block_nbytes
        num_tokens = NUM_BLOCKS * cluster.config.engine.block_size
        followed = await follow_and_break(node, "lapsing", num_tokens, nbytes)

        async def all_free() -> bool:
            return await node.num_used() == 0

        await eventually(all_free)
        # The node counts no less than its follower.
        with pytest.raises(GrantLapsed), followed.held.within(10.0):
            raise AssertionError("its blocks may be others' now")
