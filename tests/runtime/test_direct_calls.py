"""Calls over a Unix socket: what they demand, answer and raise is as over gRPC."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError, NodeUnavailable, RemoteError
from moonpool.runtime.observing.log import request_id
from moonpool.runtime.rpc import frames
from moonpool.runtime.rpc.direct_client import DirectConnection
from moonpool.runtime.security import certificates, process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from moonpool.runtime.service.vital import cancel_and_wait

KEY = SecurityOptions(cluster_key="0123456789abcdef")


class Node(node_pb2_grpc.NodeServicer):
    def __init__(self) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self.num_messages, self.num_sent, self.stays, self.size = 3, 0, False, 0
        self.fault: Exception | None = None

    async def Status(self, request: Any, context: Any) -> Any:
        return node_pb2.NodeStatus(node_id=request_id.get(), role=context.peer().partition(":")[0])

    async def Drain(self, request: Any, context: Any) -> Any:
        raise ConfigError("the sentence")

    async def Release(self, request: Any, context: Any) -> Any:
        self.began.set()
        try:
            await asyncio.sleep(600)
        finally:
            self.ended.set()

    async def Evict(self, request: node_pb2.EvictRequest, context: Any) -> Any:
        assert request.keys == b"x" * len(request.keys)
        return node_pb2.EvictReply(num_blocks=len(request.keys))

    async def ListBlocks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """As many messages as ``num_messages``; then ``fault``, if there is one, or the end."""
        try:
            for number in range(self.num_messages):
                self.num_sent = number
                yield node_pb2.BlockListing(epoch=number, changes=context.peer().encode() + bytes(self.size))
            self.began.set()
            if self.fault is not None:
                raise self.fault
            if self.stays:
                await asyncio.sleep(600)
        finally:
            self.ended.set()

    async def Lease(self, request: Any, context: Any) -> Any:
        return node_pb2.LeaseReply(blocks=node_pb2.BlockSpans(offset=range(1 << 28, (1 << 28) + (1 << 16))))


@asynccontextmanager
async def served(
    *, direct: bool = True, theirs: SecurityOptions = KEY, ours: SecurityOptions = KEY, role: str = "operator"
) -> AsyncIterator[tuple[Node, str, rpc.Server, Any]]:
    node = Node()
    process.use(Security(theirs, Caller("node", "n")))
    add = node_pb2_grpc.add_NodeServicer_to_server
    server, port = await rpc.serve([(add, node)], "127.0.0.1", 0, direct=direct)
    process.use(Security(ours, Caller(role, "me")))
    address = f"127.0.0.1:{port}"
    try:
        async with rpc.channel(address, direct=True) as channel:
            yield node, address, server, node_pb2_grpc.NodeStub(channel)
    finally:
        await server.stop(None)


async def test_a_call_goes_over_the_unix_socket_with_its_request_id() -> None:
    async with served() as (_, _, _, stub):
        token = request_id.set("r-1")
        try:
            reply = await stub.Status(node_pb2.StatusRequest(), metadata=rpc.request_metadata())
        finally:
            request_id.reset(token)
        assert (reply.node_id, reply.role) == ("r-1", "unix")


async def test_a_server_without_direct_calls_is_reached_over_grpc() -> None:
    async with served(direct=False) as (_, _, _, stub):
        assert (await stub.Status(node_pb2.StatusRequest())).role == "ipv4"


async def test_where_certificates_are_demanded_calls_go_over_grpc(tmp_path: Path) -> None:
    certificates.init(tmp_path / "ca", days=1)

    def issued(role: str) -> SecurityOptions:
        file = certificates.issue(tmp_path / "ca", Caller(role, role), days=1)
        ca = str(tmp_path / "ca" / "ca.pem")
        return SecurityOptions(cert=str(file), key=str(file.with_suffix(".key")), ca=ca)

    async with served(theirs=issued("node"), ours=issued("operator")) as (_, address, _, stub):
        assert (await stub.Status(node_pb2.StatusRequest())).role == "ipv4"
        with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect(frames.socket_name(address))


async def test_errors_arrive_with_their_text_and_kind() -> None:
    async with served() as (_, _, _, stub):
        with pytest.raises(RemoteError, match="node n: the sentence") as caught, rpc.node_errors("n"):
            await stub.Drain(node_pb2.DrainRequest())
        assert (caught.value.kind, caught.value.status) == ("ConfigError", "INVALID_ARGUMENT")
        with pytest.raises(RemoteError, match="not implemented"), rpc.node_errors("n"):
            await stub.Renew(node_pb2.RenewRequest())  # its method is not implemented


async def test_a_call_needs_the_key_of_the_cluster_and_a_role_that_may_make_it() -> None:
    wrong = SecurityOptions(cluster_key="fedcba9876543210")
    for ours, role, why in (
        (SecurityOptions(), "operator", "no token"),
        (wrong, "operator", "another cluster key"),
        (KEY, "client", "not for the role client"),
    ):
        async with served(ours=ours, role=role) as (_, _, _, stub):
            with pytest.raises(RemoteError, match=why), rpc.node_errors("n"):
                await stub.Drain(node_pb2.DrainRequest())


LIST = node_pb2.ListBlocksRequest()


async def test_a_stream_brings_its_messages_in_order_and_ends() -> None:
    async with served() as (node, _, _, stub):
        node.num_messages = 5 * frames.WINDOW
        for _ in range(2):
            stream = stub.ListBlocks(LIST)
            assert [each.epoch async for each in stream] == list(range(5 * frames.WINDOW))
            assert await stream.code() is grpc.StatusCode.OK
    async with served(direct=False) as (_, _, _, stub):
        assert [each.changes[:4] async for each in stub.ListBlocks(LIST)] == [b"ipv4"] * 3


async def test_a_stream_ends_with_the_error_of_its_method_after_its_messages() -> None:
    async with served() as (node, _, _, stub):
        node.fault, seen = ConfigError("the sentence"), []
        with pytest.raises(RemoteError, match="the sentence") as caught, rpc.node_errors("n"):
            async for each in stub.ListBlocks(LIST):
                seen.append(each.changes)
        assert (caught.value.kind, seen) == ("ConfigError", [b"unix:"] * 3)


async def test_a_method_waits_for_a_caller_that_does_not_read_while_other_calls_go_on() -> None:
    async with served() as (node, _, _, stub):
        node.num_messages = 3 * frames.WINDOW
        stream = stub.ListBlocks(LIST)
        assert (await anext(stream)).epoch == 0
        for _ in range(3):
            await stub.Status(node_pb2.StatusRequest())
        assert node.num_sent == frames.WINDOW
        assert [each.epoch async for each in stream] == list(range(1, 3 * frames.WINDOW))


@pytest.mark.parametrize("how", ["cancelled", "its reader is cancelled", "late", "closed", "lost", "stopped"])
async def test_a_stream_ends_on_both_sides(how: str) -> None:
    async with served() as (node, address, server, _), rpc.channel(address, direct=True) as channel:
        node.stays = True
        stream: Any = node_pb2_grpc.NodeStub(channel).ListBlocks(LIST, timeout=1.0 if how == "late" else None)
        seen: list[int] = []

        async def read() -> None:
            with rpc.node_errors("n"):
                async for each in stream:
                    seen.append(each.epoch)

        reading = asyncio.create_task(read())
        await node.began.wait()
        expected: type[BaseException] = NodeUnavailable
        if how == "cancelled":
            stream.cancel()
            expected = asyncio.CancelledError
        elif how == "its reader is cancelled":
            reading.cancel()
            expected = asyncio.CancelledError
        elif how == "closed":
            await channel.close()
        elif how == "lost":
            rpc.lose(channel)
        elif how == "stopped":
            await server.stop(None)
        with pytest.raises(expected):
            await asyncio.wait_for(reading, 60)
        async with asyncio.timeout(60):
            await node.ended.wait()
            assert await stream.code() is not grpc.StatusCode.OK
        assert seen in ([], [0, 1, 2])


async def test_a_call_that_is_cancelled_before_its_method_begins_leaves_nothing() -> None:
    async with served() as (_, _, server, stub):
        await stub.Status(node_pb2.StatusRequest())
        assert server._direct is not None
        (connection,) = server._direct._connections
        for _ in range(3):
            asking = asyncio.ensure_future(stub.Release(node_pb2.ReleaseRequest()))
            await asyncio.sleep(0)
            asking.cancel()
            stub.ListBlocks(LIST).cancel()
        await stub.Status(node_pb2.StatusRequest())
        async with asyncio.timeout(60):
            while connection.calls or connection._streams:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_large_messages_both_ways_at_once() -> None:
    async with served() as (_, _, _, stub):
        nbytes = 8 << 20
        asked = [stub.Evict(node_pb2.EvictRequest(keys=b"x" * nbytes)) for _ in range(3)]
        leases = [stub.Lease(node_pb2.LeaseRequest()) for _ in range(3)]
        assert [(await each).num_blocks for each in asked] == [nbytes] * 3
        assert [len((await each).blocks.offset) for each in leases] == [1 << 16] * 3


@pytest.mark.parametrize("how", ["cancelled", "late", "closed"])
async def test_a_method_ends_with_its_caller(how: str) -> None:
    async with served() as (node, address, _, _), rpc.channel(address, direct=True) as channel:
        stub: Any = node_pb2_grpc.NodeStub(channel)
        timeout = 1.0 if how == "late" else None

        async def ask() -> None:
            with rpc.node_errors("n"):
                await stub.Release(node_pb2.ReleaseRequest(), timeout=timeout)

        asking = asyncio.create_task(ask())
        await node.began.wait()
        if how == "cancelled":
            asking.cancel()
        elif how == "closed":
            await channel.close()
        expected = asyncio.CancelledError if how == "cancelled" else NodeUnavailable
        with pytest.raises(expected):
            await asking
        async with asyncio.timeout(60):
            await node.ended.wait()


def callers_ends(monkeypatch: pytest.MonkeyPatch) -> list[frames.FrameSocket]:
    """Of the connections made from now on."""
    ends: list[frames.FrameSocket] = []
    connect = DirectConnection._connect

    def connected(connection: DirectConnection) -> frames.FrameSocket | None:
        if (end := connect(connection)) is not None:
            ends.append(end)
        return end

    monkeypatch.setattr(DirectConnection, "_connect", connected)
    return ends


async def test_a_server_that_stops_sends_the_rest_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller stands still for a while, and the kernel has no room for all."""
    ends = callers_ends(monkeypatch)
    async with served() as (_, _, server, stub):
        await stub.Status(node_pb2.StatusRequest())
        (ours,) = ends
        ours.pause()
        asking = asyncio.ensure_future(stub.Lease(node_pb2.LeaseRequest()))
        assert server._direct is not None
        (theirs,) = server._direct._connections
        while not theirs._frames.backlog_nbytes or theirs.calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
        stopping = asyncio.create_task(server.stop(60))
        await asyncio.wait((stopping,), timeout=0.1)
        ours.resume()
        assert len((await asyncio.wait_for(asking, 60)).blocks.offset) == 1 << 16
        await asyncio.wait_for(stopping, 60)


async def test_what_a_stream_has_sent_and_its_caller_not_taken_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the stream ends: a node that drains waits for it."""
    ends = callers_ends(monkeypatch)
    async with served() as (node, _, server, stub):
        await stub.Status(node_pb2.StatusRequest())
        node.stays, node.size = True, 1 << 20

        async def read() -> int:
            return len([one async for one in stub.ListBlocks(LIST)])

        ends[0].pause()
        reading = asyncio.ensure_future(read())
        await asyncio.wait_for(node.began.wait(), 60)
        assert server.backlog_nbytes > 1 << 20
        assert server._direct is not None
        (theirs,) = server._direct._connections
        (call,) = theirs.calls.values()
        call.cancel()
        await asyncio.wait((call,))
        assert not server.backlog_nbytes
        ends[0].resume()
        await cancel_and_wait(reading)


async def test_calls_of_a_server_that_stops_fail_at_once_and_it_is_reached_again() -> None:
    async with served() as (node, address, server, stub):
        asking = asyncio.ensure_future(stub.Release(node_pb2.ReleaseRequest()))
        await node.began.wait()
        await server.stop(None)
        with pytest.raises(NodeUnavailable, match="node n is unavailable"), rpc.node_errors("n"):
            await asyncio.wait_for(asking, 60)
        with pytest.raises(NodeUnavailable), rpc.node_errors("n"):
            await asyncio.wait_for(stub.Status(node_pb2.StatusRequest()), 60)
        process.use(Security(KEY, Caller("node", "n")))
        add, port = node_pb2_grpc.add_NodeServicer_to_server, int(address.rpartition(":")[2])
        again, _ = await rpc.serve([(add, Node())], "127.0.0.1", port, direct=True)
        assert (await stub.Status(node_pb2.StatusRequest())).role == "unix"
        await again.stop(None)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        frames._HEADER.pack(0, 9, 1),
        frames._HEADER.pack(2, frames.Frame.CALL, 1) + b"xx",
        frames._HEADER.pack(8, frames.Frame.CALL, 1) + b"\xff" * 8,
        frames._HEADER.pack(6, frames.Frame.CALL, 1) + b"\x01\0\x01\0\xff\xff",
        frames._HEADER.pack(0, frames.Frame.MESSAGE, 1),
    ],
    ids=["long", "kind", "short", "cut off", "text", "direction"],
)
async def test_garbage_ends_its_connection_alone(garbage: bytes) -> None:
    async with served() as (_, address, _, stub):
        await stub.Status(node_pb2.StatusRequest())
        reader, writer = await asyncio.open_unix_connection(frames.socket_name(address))
        writer.write(garbage)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        assert (await stub.Status(node_pb2.StatusRequest())).role == "unix"


async def test_other_users_are_neither_served_nor_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (_, address, _, stub):
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        assert (await stub.Status(node_pb2.StatusRequest())).role == "ipv4"
        reader, writer = await asyncio.open_unix_connection(frames.socket_name(address))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_a_server_that_stops_refuses_calls_on_open_connections_and_finishes_those_that_run() -> None:
    async with served() as (node, address, server, stub):
        node.num_messages = 2 * frames.WINDOW
        stream = stub.ListBlocks(LIST)
        assert (await anext(stream)).epoch == 0
        stopping = asyncio.create_task(server.stop(60))
        async with asyncio.timeout(60):
            with pytest.raises(ConnectionRefusedError):
                while True:
                    _, writer = await asyncio.open_unix_connection(frames.socket_name(address))
                    writer.close()
        with pytest.raises(NodeUnavailable, match="it stops"), rpc.node_errors("n"):
            await stub.Status(node_pb2.StatusRequest())
        assert [each.epoch async for each in stream] == list(range(1, 2 * frames.WINDOW))
        await asyncio.wait_for(stopping, 40)
