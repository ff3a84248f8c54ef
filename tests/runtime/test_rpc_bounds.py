"""What a stranger can send to a gRPC server: nothing that costs much before it is refused."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.rpc import server
from moonpool.runtime.rpc.bounds import SERVER_OPTIONS
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import NODE, Caller
from tests.runtime.test_rpc import served

PATH = "/moonpool.Node/Status"


@pytest.fixture
def secured(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SecurityOptions(cluster_key="a key of the cluster")
    monkeypatch.setattr(process, "_current", process.Security(options, Caller(NODE, "n")))


async def refused(channel: grpc.aio.Channel, path: str, body: bytes, **about: Any) -> grpc.aio.AioRpcError:
    call: Any = channel.unary_unary(path)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(body, timeout=60, **about)
    return caught.value


@pytest.mark.usefixtures("secured")
async def test_a_stranger_is_refused_before_its_message_is_received() -> None:
    async with served() as (_, port, _), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as stranger:
        # This is no message at all. Who had it parsed would say so.
        for body in (b"\xff", b"\xff" * (8 << 20)):
            error = await refused(stranger, PATH, body)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED, error.details()


async def test_what_is_no_message_is_refused_in_words() -> None:
    async with served() as (_, port, _), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as raw:
        error = await refused(raw, PATH, b"\xff")
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be read" in (error.details() or "")
        call: Any = raw.stream_unary(PATH)
        with pytest.raises(grpc.aio.AioRpcError, match="no message"):
            await call(iter(()))


async def test_a_compressed_message_is_refused_unopened() -> None:
    options = [("grpc.max_send_message_length", -1)]
    before_nbytes = psutil.Process().memory_info().rss
    async with served() as (_, port, _):
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(
            address, compression=grpc.Compression.Gzip, options=options
        ) as raw:
            error = await refused(raw, PATH, b"\x0a\x80\x80\x80\x18" + bytes(48 << 20))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "ompression" in (error.details() or "")
    assert psutil.Process().memory_info().rss < before_nbytes + (120 << 20)


async def test_metadata_has_a_greatest_size() -> None:
    async with served() as (_, port, _):
        options = [("grpc.max_metadata_size", 1 << 20), ("grpc.absolute_max_metadata_size", 1 << 20)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as raw:
            error = await refused(raw, PATH, b"", metadata=(("x-large", "x" * 20_000),))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            call: Any = raw.unary_unary(PATH)
            assert await call(b"", metadata=(("x-small", "x" * 2_000),)) is not None


async def test_a_message_has_a_greatest_size() -> None:
    async with served() as (_, port, _):
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as raw:
            error = await refused(raw, PATH, bytes(rpc.MAX_MESSAGE_NBYTES + 1))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in (error.details() or "")


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n"], ids=["silent", "half"])
async def test_a_connection_that_says_nothing_is_closed_in_time(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = [option for option in SERVER_OPTIONS if option[0] != "grpc.server_handshake_timeout_ms"]
    monkeypatch.setattr(server, "SERVER_OPTIONS", [*patched, ("grpc.server_handshake_timeout_ms", 200)])
    async with served() as (_, port, channel):
        loop = asyncio.get_running_loop()
        silent = socket.create_connection(("127.0.0.1", port))
        silent.setblocking(False)
        await loop.sock_sendall(silent, said)
        stub: Any = node_pb2_grpc.NodeStub(channel)
        async with asyncio.timeout(60):
            while True:  # others are served meanwhile, as soon as one says something in time
                try:
                    await stub.Status(node_pb2.StatusRequest())
                    break
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
        async with asyncio.timeout(60):
            while await loop.sock_recv(silent, 1 << 16):
                pass
        silent.close()
