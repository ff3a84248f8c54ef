"""Which agents may connect: keys, roles, incarnations; and clients that never finish a handshake."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest

from moonpool.runtime.config.options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import process
from moonpool.runtime.security.call_tokens import RoleKeys
from moonpool.runtime.security.roles import Caller
from moonpool.transfer import (
    AccessDenied,
    PeerLost,
    Span,
    Spans,
    StaleEpoch,
    TransferError,
)
from moonpool.transfer.connections import listener
from moonpool.transfer.connections.handshake import handshake_as_client
from moonpool.transfer.connections.wire import REPLY_NBYTES, Kind, Op, Reply, Request, Status, pack_spans
from moonpool.transfer.paths.tcp import stream_server
from tests.transfer.safety.served import NBYTES, Served, connect, ends, exactly, start

KEY = "open sesame, this is me"


def act_as(role: str, cluster_key: str) -> None:
    process.use(process.Security(SecurityOptions(cluster_key=cluster_key), Caller(role, "me")))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_cluster_key_must_be_the_same(transport: str) -> None:
    act_as("node", KEY)
    async with await start("server", transport) as server:
        for role in ("node", "client", "operator"):
            act_as(role, RoleKeys(KEY).text_of(role))
            async with await start("friend", transport) as friend:
                await friend.connect(server.describe())
        wrongs = [("node", ""), ("node", KEY[:-1]), ("node", KEY + " "), ("conductor", KEY)]
        for role, wrong in wrongs:
            act_as(role, wrong)
            async with await start("intruder", transport) as intruder:
                with pytest.raises(AccessDenied):
                    await intruder.connect(server.describe())


async def test_a_role_key_opens_no_other_role() -> None:
    act_as("node", KEY)
    async with await start("server") as server:
        act_as("client", RoleKeys(KEY).text_of("client"))
        async with await start("client") as client:
            client._security.me = Caller("node", "pretender")
            with pytest.raises(ConfigError, match="key of role client cannot be used as node"):
                await client.connect(server.describe())


async def test_a_server_without_a_key_is_refused_by_who_was_given_one() -> None:
    act_as("node", "")
    async with await start("server") as server:
        act_as("node", KEY)
        async with await start("client") as client:
            with pytest.raises(AccessDenied, match="no cluster key"):
                await client.connect(server.describe())
        # A command has the key of this user's local clusters, and talks to others too.
        process.use(
            process.Security(SecurityOptions(cluster_key=KEY), Caller("operator", "me"), serves=False)
        )
        async with await start("command") as command:
            await command.connect(server.describe())


async def test_a_server_must_prove_itself_too(served: Served) -> None:
    """An impostor at the address that repeats public messages is refused."""
    descriptor = served.server.describe()
    listening = socket.create_server(("127.0.0.1", 0))

    async def impostor() -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        sock, _ = await loop.sock_accept(listening)
        real = await connect(descriptor)
        # It lets the real server answer the hello, but cannot answer the proof.
        await loop.sock_sendall(real, await loop.sock_recv(sock, 1000))
        await loop.sock_sendall(sock, await loop.sock_recv(real, 1000))
        await loop.sock_recv(sock, 1000)
        await loop.sock_sendall(sock, bytes(4) + os.urandom(32) + bytes(8))
        sock.close()
        real.close()

    task = asyncio.create_task(impostor())
    with pytest.raises(AccessDenied):
        await served.client.connect(replace(descriptor, tcp_port=listening.getsockname()[1]))
    await task
    listening.close()


async def test_another_incarnation_is_stale(served: Served) -> None:
    other = replace(served.server.describe(), incarnation=os.urandom(16), epoch=0)
    with pytest.raises(StaleEpoch) as caught:
        await served.client.connect(other)
    assert (caught.value.expected, caught.value.found) == (0, 1)


async def test_nobody_listens(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(PeerLost):
        await served.client.connect(replace(served.server.describe(), incarnation=bytes(16), tcp_port=port))


async def test_silent_clients_do_not_keep_others_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = served.server.describe()
    silent = [await connect(descriptor) for _ in range(listener.MAX_UNAUTHENTICATED * 3)]
    await served.works()
    for sock in silent:
        sock.close()


async def test_silent_clients_are_disconnected_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.1)
    sock = await connect(served.server.describe())
    assert await ends(sock) == b""


async def test_silent_clients_of_one_address_do_not_end_the_handshakes_of_others(served: Served) -> None:
    descriptor = served.server.describe()
    loop = asyncio.get_running_loop()
    other = socket.socket()
    other.setblocking(False)
    other.bind(("127.0.0.2", 0))
    await loop.sock_connect(other, (descriptor.tcp_host, descriptor.tcp_port))
    # It comes first and is slow; the flood comes after it.
    flood = [await connect(descriptor) for _ in range(listener.MAX_UNAUTHENTICATED * 3)]
    await ends(flood[0])
    await handshake_as_client(other, descriptor, served.client.identity, process.current(), Kind.DATA)
    for sock in (other, *flood):
        sock.close()


async def test_one_agent_has_a_part_of_the_connections(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_PEER_CONNECTIONS", 8)
    kept = [await served.meet(Kind.DATA) for _ in range(8)]
    with pytest.raises(PeerLost, match="connection to spare"):
        await served.meet(Kind.DATA)
    async with await start("other") as other:
        await other.connect(served.server.describe())
    for sock in kept:
        sock.close()


async def test_a_request_that_does_not_end_does_not_keep_a_thread(served: Served) -> None:
    sock = await served.meet(Kind.DATA)
    loop = asyncio.get_running_loop()
    request = Request(Op.READ, 100, 300, 100 * 16)
    await loop.sock_sendall(sock, request.pack() + bytes(40))  # 100 spans are announced
    assert await ends(sock) == b""
    await served.works()


async def test_too_many_connections_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await served.works()
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 1)
    async with await start("late") as late:
        with pytest.raises(PeerLost, match="connection to spare"):
            await late.connect(served.server.describe())


async def test_idle_connections_make_way_for_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 6)
    monkeypatch.setattr(stream_server, "IDLE_S", 0.0)
    server = served.server
    async with await start("second") as second, await start("third") as third:
        for agent in (served.client, second, third, served.client, second):
            await served.read(agent)
        async with asyncio.timeout(60):
            # The threads of those that were ended.
            while len(server._server) + len(server._controls) > listener.MAX_CONNECTIONS:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_connections_in_use_do_not_make_way(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is refused one for data gets it once there is room."""
    await served.read(served.client)
    num_used = len(served.server._server)
    assert num_used and not served.server._server.num_idle()
    async with await start("late") as late:
        await late.connect(served.server.describe())
        monkeypatch.setattr(listener, "MAX_CONNECTIONS", num_used + 2)
        with pytest.raises(TransferError, match="connection to spare"):
            await served.read(late)
        assert len(served.server._server) == num_used
        monkeypatch.undo()
        await served.read(late)


async def test_only_a_client_that_proved_itself_ends_an_idle_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    act_as("node", KEY)
    monkeypatch.setattr(stream_server, "IDLE_S", 0.0)
    async with await start("server") as server, await start("client") as client:
        peer = await client.connect(server.describe())
        await peer.paths.ranked()[0].open("read", [])
        async with asyncio.timeout(60):
            while server._server.num_idle() < client.options.tcp.streams:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        monkeypatch.setattr(listener, "MAX_CONNECTIONS", 3)
        act_as("node", KEY[:-1])
        async with await start("intruder") as intruder:
            with pytest.raises(AccessDenied):
                await intruder.connect(server.describe())
        assert server._server.num_idle() == client.options.tcp.streams


async def test_a_request_in_progress_does_not_make_way(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "IDLE_S", 0.0)
    server, loop = served.server._server, asyncio.get_running_loop()
    async with asyncio.timeout(60):
        while len(server):  # noqa: ASYNC110 (of the client that has measured)
            await asyncio.sleep(0.001)
    sock = await served.meet(Kind.DATA)
    spans = Spans.of([Span(served.region.id, 0, NBYTES)])
    head = Request(Op.WRITE, 1, 60_000, NBYTES).pack() + pack_spans(spans)
    # The same bytes that are there.
    payload = served.region.array.tobytes()
    await loop.sock_sendall(sock, head + payload[:1000])
    async with asyncio.timeout(60):
        while not len(server) or server.num_idle():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 1)
    async with await start("late") as late:
        with pytest.raises(PeerLost, match="connection to spare"):
            await late.connect(served.server.describe())
    await loop.sock_sendall(sock, payload[1000:])
    assert Reply.unpack(await exactly(sock, REPLY_NBYTES)).status is Status.OK
    sock.close()


@hypothesis.settings(
    max_examples=60, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(data=st.data())
def test_garbage_before_the_handshake(data: st.DataObject) -> None:
    """Any bytes at all: the connection ends, the agent does not."""

    async def run() -> None:
        async with await start("server") as server:
            descriptor = server.describe()
            hello = b"MPh1" + (1).to_bytes(2, "little") + b"\x01\0" + descriptor.incarnation
            for _ in range(3):
                sock = await connect(descriptor)
                garbage = data.draw(st.sampled_from([b"", hello, b"GET / HTTP/1.1\r\n\r\n"])) + data.draw(
                    st.binary(max_size=300)
                )
                await asyncio.get_running_loop().sock_sendall(sock, garbage)
                sock.shutdown(socket.SHUT_WR)
                await ends(sock)
            async with await start("client") as client:
                await client.connect(descriptor)

    asyncio.run(run())
