"""Errors, ids and ports at the gRPC boundary, over real sockets."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError, NodeUnavailable, PortInUse, RemoteError
from moonpool.runtime.network.sockets import check_free
from moonpool.runtime.observing.log import request_id
from moonpool.runtime.security import process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller


class Node(node_pb2_grpc.NodeServicer):
    async def Status(self, request: Any, context: Any) -> Any:
        return node_pb2.NodeStatus(node_id=request_id.get())

    async def Drain(self, request: Any, context: Any) -> Any:
        raise ConfigError("the sentence")

    async def Release(self, request: Any, context: Any) -> Any:
        raise ZeroDivisionError("a bug")


class Decode(node_pb2_grpc.DecodeNodeServicer):
    async def Tokens(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield node_pb2.StepTokens(num_running=1)
        raise ConfigError("after the first")


@asynccontextmanager
async def served() -> AsyncIterator[tuple[rpc.Server, int, grpc.aio.Channel]]:
    pairs: list[rpc.Servicer] = [
        (node_pb2_grpc.add_NodeServicer_to_server, Node()),
        (node_pb2_grpc.add_DecodeNodeServicer_to_server, Decode()),
    ]
    server, port = await rpc.serve(pairs, "127.0.0.1", 0)
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield server, port, channel
    finally:
        await server.stop(None)


async def test_request_id_travels() -> None:
    async with served() as (_, _, channel):
        stub: Any = node_pb2_grpc.NodeStub(channel)
        token = request_id.set("r-1")
        try:
            reply = await stub.Status(node_pb2.StatusRequest(), metadata=rpc.request_metadata())
        finally:
            request_id.reset(token)
        assert reply.node_id == "r-1"
        assert (await stub.Status(node_pb2.StatusRequest())).node_id == ""


async def test_moonpool_error_arrives_with_its_text() -> None:
    async with served() as (_, _, channel):
        stub: Any = node_pb2_grpc.NodeStub(channel)
        with pytest.raises(RemoteError, match="node n: the sentence") as caught, rpc.node_errors("n"):
            await stub.Drain(node_pb2.DrainRequest())
        assert (caught.value.kind, caught.value.status) == ("ConfigError", "INVALID_ARGUMENT")


async def test_a_bug_arrives_as_internal() -> None:
    async with served() as (_, _, channel):
        stub: Any = node_pb2_grpc.NodeStub(channel)
        with pytest.raises(RemoteError) as caught, rpc.node_errors("n"):
            await stub.Release(node_pb2.ReleaseRequest())
        assert (caught.value.kind, caught.value.status) == ("ZeroDivisionError", "INTERNAL")


async def test_a_stream_fails_after_its_messages() -> None:
    async with served() as (_, _, channel):
        stub: Any = node_pb2_grpc.DecodeNodeStub(channel)
        seen = []
        with pytest.raises(RemoteError, match="after the first"), rpc.node_errors("n"):
            async for step in stub.Tokens(node_pb2.TokensRequest()):
                seen.append(step.num_running)
        assert seen == [1]


async def test_a_dead_node_is_unavailable() -> None:
    async with served() as (server, _, channel):
        await server.stop(None)
        stub: Any = node_pb2_grpc.NodeStub(channel)
        with pytest.raises(NodeUnavailable, match="node n is unavailable"), rpc.node_errors("n"):
            await asyncio.wait_for(stub.Status(node_pb2.StatusRequest()), 60)


async def test_a_call_on_a_channel_that_was_closed_here_is_a_node_that_is_gone() -> None:
    """A client has given the node up while one of its puts still names it."""
    async with served() as (_, _, channel):
        await channel.close()
        stub: Any = node_pb2_grpc.NodeStub(channel)
        with pytest.raises(NodeUnavailable, match="the connection was closed here"), rpc.node_errors("n"):
            await stub.Status(node_pb2.StatusRequest())


def listening() -> set[int]:
    """Ports of this process."""
    sockets = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_start_that_is_cancelled_leaves_no_server_behind(num_turns: int) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    before = listening()
    starting = asyncio.create_task(rpc.serve([], "127.0.0.1", 0))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait((starting,))
    if not starting.cancelled():  # it was done before
        server, _ = await starting
        await server.stop(None)
    gc.collect()
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while not listening() <= before:  # noqa: ASYNC110 (gRPC closes them from a thread of its own)
            await asyncio.sleep(0.01)
    assert not failures


async def test_a_port_in_use_is_a_sentence() -> None:
    async with served() as (_, port, _):
        with pytest.raises(PortInUse, match=rf"port {port} .* in use.*node\.port"):
            await rpc.serve([], "127.0.0.1", port)


@pytest.mark.parametrize("failing", ["socket", "bind"])
def test_a_port_is_free_where_the_kernel_has_no_ipv6(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutIpv6(socket.socket):
        def __init__(self, family: int, kind: int, protocol: int) -> None:
            if family == socket.AF_INET6 and failing == "socket":
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, kind, protocol)

        def bind(self, address: Any) -> None:
            if self.family == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    with socket.create_server(("0.0.0.0", 0)) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setattr(socket, "socket", WithoutIpv6)
        check_free("", 0)
        with pytest.raises(OSError, match="in use"):
            check_free("", taken)
        with pytest.raises(OSError, match=r"not supported|Cannot assign"):
            check_free("::1", 0)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_an_address_of_another_machine_is_a_sentence(host: str) -> None:
    """One of those that are for documentation alone."""
    process.use(Security(SecurityOptions(cluster_key="0123456789abcdef"), Caller("node", "n")))
    before = listening()
    with pytest.raises(ConfigError, match=rf"{host} is no address of this machine .*: set node\.host to one"):
        await rpc.serve([], host, 0)
    with pytest.raises(ConfigError, match=r"set engine\.parallel\.listen to one"):
        rpc.serve_threaded(
            node_pb2_grpc.add_RanksServicer_to_server,
            node_pb2_grpc.RanksServicer(),
            host,
            0,
            option="engine.parallel.listen",
            max_calls=1,
        )
    assert listening() <= before


async def test_a_node_that_answers_its_first_frame_late_is_reached() -> None:
    """A busy one: its process gets no processor for a while."""

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.5)
        await asyncio.gather(copy(reader, to_server), copy(upstream, writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async with served() as (_, port, _):
        proxy = await asyncio.start_server(late, "127.0.0.1", 0)
        async with proxy, rpc.channel(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}") as channel:
            stub: Any = node_pb2_grpc.NodeStub(channel)
            assert (await stub.Status(node_pb2.StatusRequest(), timeout=60)).node_id == ""
