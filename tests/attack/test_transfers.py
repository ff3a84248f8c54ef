"""Attacks on the ports that move blocks: strangers, garbage and floods."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime.config.options import SecurityOptions, TransferOptions
from moonpool.runtime.security import process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from moonpool.transfer import AgentDescriptor, TransferAgent
from moonpool.transfer.errors import TransferError
from tests.attack.conftest import Target, channel_as, issued
from tests.cluster.conftest import eventually


async def agents(target: Target) -> dict[str, AgentDescriptor]:
    """How to reach the agents of all nodes; any node may ask for it."""
    found = {}
    for name, address in (await target.rpc_addresses()).items():
        if name == "conductor":
            continue
        async with channel_as(address, target.proof("operator"), "operator") as channel:
            status = await node_pb2_grpc.NodeStub(channel).Status(node_pb2.StatusRequest(), timeout=20)
        found[name] = AgentDescriptor.unpack(status.kv.agent)
    return found


async def connects(proof: SecurityOptions, role: str, to: AgentDescriptor, transport: str) -> bool:
    before = process.current()
    process.use(Security(proof, Caller(role, "a stranger"), serves=False))
    try:
        options = TransferOptions(transports=(transport,))
        async with await TransferAgent.start(options, agent_id="a stranger", epoch=1) as agent:
            await agent.connect(to)
    except TransferError:
        return False
    finally:
        process.use(before)
    return True


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_a_stranger_reads_no_memory(target: Target, transport: str) -> None:
    strangers = [SecurityOptions(), SecurityOptions(cluster_key="the key of another cluster")]
    if target.authority is not None:
        strangers.append(issued(target.authority, "client", days=0))
    found = await agents(target)
    for name, descriptor in found.items():
        assert await connects(target.proof("node"), "node", descriptor, transport)
        for proof in strangers:
            assert not await connects(proof, "node", descriptor, transport), (name, proof)

    async def is_logged() -> bool:
        # A flood of another test may have had all lines of the period of 10 s.
        assert not await connects(strangers[0], "node", found["prefill-0"], transport)
        return target.has_logged(event="refused", what="transfer", process="prefill-0")

    await eventually(is_logged)
    await target.serves()


async def test_garbage_and_floods_of_handshakes_keep_nobody_out(target: Target) -> None:
    loop, held = asyncio.get_running_loop(), []
    for descriptor in (await agents(target)).values():
        for number in range(300):
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, (descriptor.tcp_host, descriptor.tcp_port))
            if number % 3:
                await loop.sock_sendall(sock, os.urandom(200) if number % 2 else b"MPh1" + bytes(9))
            held.append(sock)
        assert await connects(target.proof("node"), "node", descriptor, "tcp")
    await target.serves()
    for sock in held:
        sock.close()
