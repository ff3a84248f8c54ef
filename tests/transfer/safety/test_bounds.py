"""Peers that announce, send or wait too much take nothing from others."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import psutil
import pytest

from moonpool.transfer import (
    Span,
    Spans,
)
from moonpool.transfer.connections import listener, wire
from moonpool.transfer.connections.wire import FRAME_HEADER, Kind, Op, Reply, Request, Status, pack_spans
from moonpool.transfer.paths.tcp.stream_path import StreamPath
from tests.transfer.safety.served import NBYTES, Served, connect, ends, exactly, start


async def test_a_client_cannot_end_the_connections_of_others(served: Served) -> None:
    """A client names its own connections by number; another one's are not among them."""
    loop = asyncio.get_running_loop()
    await served.works()
    (path,) = (await served.client.connect(served.server.describe())).paths
    assert isinstance(path, StreamPath)
    streams = set(path._streams)
    async with await start("other") as other:
        others = Served(served.server, served.region, other)
        sock = await others.meet(Kind.DATA)
        await loop.sock_sendall(sock, wire.pack_end(range(1, 4097), 1000))
        assert Reply.unpack(await exactly(sock, wire.REPLY_NBYTES)).status is Status.OK
        sock.close()
    await served.works()
    assert set(path._streams) == streams


async def test_announced_sizes_allocate_no_memory(served: Served) -> None:
    """The largest lengths there are, on many connections that then go silent: no memory is set aside."""
    process = psutil.Process()
    loop = asyncio.get_running_loop()
    await served.works()
    before = process.memory_info().rss
    largest = (
        Request(Op.WRITE, wire.MAX_REQUEST_SPANS, 1000, wire.MAX_REQUEST_NBYTES).pack(),
        Request(Op.CHECKSUM, wire.MAX_REQUEST_SPANS, 1000, wire.MAX_CHECKED_NBYTES).pack(),
    )
    silent = []
    for turn in range(60):
        if turn % 3:
            sock = await served.meet(Kind.DATA)
            await loop.sock_sendall(sock, largest[turn % 2] + bytes(100))
        else:
            sock = await served.meet(Kind.CONTROL)
            await loop.sock_sendall(sock, FRAME_HEADER.pack(wire.MAX_FRAME_NBYTES, 1) + bytes(100))
        silent.append(sock)
    await served.works()
    assert process.memory_info().rss - before < 32 << 20
    for sock in silent:
        sock.close()


async def test_dripping_clients_are_disconnected_too(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single bytes do not extend the time limit of a handshake, and do not delay other clients."""
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.5)
    loop = asyncio.get_running_loop()

    hello = b"MPh1" + (1).to_bytes(2, "little") + b"\x01\0" + served.server.describe().incarnation

    async def drip(sock: socket.socket) -> int:
        sent = 0
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for sent in range(len(hello) - 1):
                await loop.sock_sendall(sock, hello[sent : sent + 1])
                await asyncio.sleep(0.05)
        sock.close()
        return sent

    dripping = [asyncio.create_task(drip(await connect(served.server.describe()))) for _ in range(20)]
    await served.works()
    assert max(await asyncio.gather(*dripping)) < len(hello) - 2


async def test_an_endless_frame_is_not_kept(served: Served) -> None:
    sock = await served.meet(Kind.CONTROL)
    await asyncio.get_running_loop().sock_sendall(sock, FRAME_HEADER.pack(1 << 31, 1) + bytes(1000))
    assert await ends(sock) == b""
    await served.works()


async def test_slow_peers_do_not_delay_others(served: Served) -> None:
    """They ask for everything and read nothing, or announce a write and do not send it."""
    loop = asyncio.get_running_loop()
    everything = Spans.of([Span(served.region.id, 0, NBYTES)])
    slow = []
    for turn in range(20):
        sock = await served.meet(Kind.DATA)
        if turn % 2:
            ask = Request(Op.READ, 1, 60_000, NBYTES).pack() + pack_spans(everything)
            await loop.sock_sendall(sock, ask * 8)
        else:
            await loop.sock_sendall(sock, Request(Op.READ, 1, 60_000, NBYTES).pack() + b"\0")
        slow.append(sock)
    await served.works()
    # A region they are stuck on can be closed all the same: ``close`` raises where they hold on to it.
    with served.server.allocate(4 << 20, "wanted by the slow") as region:
        spans = pack_spans(Spans.of([Span(region.id, 0, 4 << 20)]))
        await loop.sock_sendall(slow[1], b"")
        sock = await served.meet(Kind.DATA)
        await loop.sock_sendall(sock, (Request(Op.READ, 1, 60_000, 4 << 20).pack() + spans) * 4)
        slow.append(sock)
        holds = served.server.regions._holds
        async with asyncio.timeout(20):
            while not any(region in hold.regions for hold in list(holds)):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    for sock in slow:
        sock.close()


async def test_a_note_is_kept_within_bounds(served: Served) -> None:
    """A peer that notes faster than anybody reads is made to wait, and loses nothing."""
    peer = await served.client.connect(served.server.describe())
    sent = 0
    # More than both sides buffer: the sender learns of it.
    with pytest.raises(Exception, match="has not taken"):
        for sent in range(1_000_000):
            peer.notify(b"%08d" % sent + bytes(1000))
            if sent % 100 == 0:
                await asyncio.sleep(0)
    assert len(served.server.notes._waiting) <= 20_000
    notes = served.server.notifications()
    for expected in range(sent):
        async with asyncio.timeout(20):
            assert (await anext(notes)).payload[:8] == b"%08d" % expected
