"""Who may call the nodes of a cluster: signed calls, each by its role, tokens only for their conductor."""

from __future__ import annotations

import grpc.aio
import pytest

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import RemoteError
from moonpool.runtime.security import process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.cluster.conftest import nodes

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def drain(address: str, security: SecurityOptions, role: str) -> None:
    process.use(Security(security, Caller(role, "a stranger")))
    async with rpc.channel(address) as channel:
        with rpc.node_errors("it"):
            await node_pb2_grpc.NodeStub(channel).Drain(node_pb2.DrainRequest(), timeout=20)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_nobody_drains_a_node_without_the_key_and_the_role(
    cluster: LocalCluster, client: Client, name: str
) -> None:
    address, ours = (await nodes(client))[name]["rpc_address"], cluster.config.security
    assert ours.cluster_key
    with pytest.raises(RemoteError, match="no token"):
        await drain(address, SecurityOptions(), "conductor")
    with pytest.raises(RemoteError, match="another cluster key"):
        await drain(address, SecurityOptions(cluster_key="the key of another cluster"), "conductor")
    for role in ("node", "client"):
        with pytest.raises(RemoteError, match=f"not for the role {role}"):
            await drain(address, ours, role)
    assert (await nodes(client))[name]["state"] == "ready"


async def test_a_node_copies_no_blocks_to_another(cluster: LocalCluster, client: Client) -> None:
    address = (await nodes(client))["prefill-0"]["rpc_address"]
    process.use(Security(cluster.config.security, Caller("node", "a stranger")))
    async with rpc.channel(address) as channel:
        wanted = node_pb2.ReplicateRequest(keys=bytes(16))
        with rpc.node_errors("it"), pytest.raises(grpc.aio.AioRpcError) as refused:
            await node_pb2_grpc.NodeStub(channel).Replicate(wanted, timeout=20)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_tokens_go_to_the_conductor_of_the_request_alone(cluster: LocalCluster, client: Client) -> None:
    reply = Reply()
    thief = None
    async for _ in client.complete("And he said ", reply, temperature=0, max_tokens=300, ignore_eos=True):
        if thief is None:
            summary = (await client.timeline(reply.id))["summary"]
            address = (await nodes(client))[summary["decode_node"]]["rpc_address"]
            process.use(Security(cluster.config.security, Caller("conductor", "a thief")))
            wanted = node_pb2.TokensRequest(conductor_id=(await client.cluster())["conductor_id"])
            async with rpc.channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as thief:
                    await anext(aiter(node_pb2_grpc.DecodeNodeStub(channel).Tokens(wanted, timeout=20)))
    assert thief is not None
    assert thief.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert reply.usage["completion_tokens"] == 300
