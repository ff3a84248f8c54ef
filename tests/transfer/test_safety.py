"""Unauthenticated clients, impostors and garbage are refused, and delay no other client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import psutil
import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import (
    AccessDenied,
    AgentDescriptor,
    DescriptorError,
    PeerLost,
    Region,
    Span,
    Spans,
    StaleEpoch,
    TransferAgent,
)
from moonpool.transfer.connections import listener, wire
from moonpool.transfer.connections.handshake import handshake_as_client
from moonpool.transfer.connections.wire import FRAME_HEADER, Kind, Op, Reply, Request, Status, pack_spans
from moonpool.transfer.paths.tcp.stream_path import StreamPath

NBYTES = 1 << 20


class Served:
    """An agent with a region, and one that reads from it."""

    def __init__(self, server: TransferAgent, region: Region, client: TransferAgent) -> None:
        self.server = server
        self.region = region
        self.client = client
        self.usual_s = 0.0
        """Seconds of one read on a new connection, without other clients."""

    async def works(self) -> None:
        """A read on new connections and one on those there are: both arrive, and about as soon as usual."""
        started = time.perf_counter()
        async with await start("late") as late:
            for agent in (late, self.client):
                await self._read(agent)
        assert time.perf_counter() - started < 1 + 10 * self.usual_s

    async def measured(self) -> Served:
        started = time.perf_counter()
        async with await start("first") as first:
            await self._read(first)
        self.usual_s = time.perf_counter() - started
        return self

    async def _read(self, agent: TransferAgent) -> None:
        with agent.allocate(NBYTES, "copy") as copy:
            peer = await agent.connect(self.server.describe())
            await peer.read([Span(copy.id, 0, NBYTES)], [Span(self.region.id, 0, NBYTES)], deadline_s=20)
            assert np.array_equal(copy.array, self.region.array)

    async def meet(self, kind: Kind) -> socket.socket:
        """A connection that has proved itself, blocking, with two seconds for everything."""
        descriptor = self.server.describe()
        sock = socket.socket()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (descriptor.tcp_host, descriptor.tcp_port))
        await handshake_as_client(sock, descriptor, self.client.identity, "", kind)
        return sock


async def start(agent_id: str, transports: str = "tcp", secret: str = "") -> TransferAgent:
    options = TransferOptions(transports=tuple(transports.split(",")), secret=secret)
    return await TransferAgent.start(options, agent_id=agent_id, epoch=1)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with await start("server") as server, await start("client") as client:
        region = server.allocate(NBYTES, "region")
        server.allow_writes(region)
        region.array[:] = np.random.default_rng(5).integers(0, 256, NBYTES, np.uint8)
        before = region.array.copy()
        yield await Served(server, region, client).measured()
        assert np.array_equal(region.array, before), "the region was written"


async def connect(descriptor: AgentDescriptor) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (descriptor.tcp_host, descriptor.tcp_port))
    return sock


async def ends(sock: socket.socket, within_s: float = 20) -> bytes:
    """What the server says until it hangs up."""
    loop, received = asyncio.get_running_loop(), b""
    try:
        async with asyncio.timeout(within_s):
            while part := await loop.sock_recv(sock, 1 << 16):
                received += part
    except ConnectionResetError:
        pass
    finally:
        sock.close()
    return received


# ---------------------------------------------------------------------- the handshake


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_secret_must_be_the_same(transport: str) -> None:
    async with await start("server", transport, "open sesame") as server:
        async with await start("friend", transport, "open sesame") as friend:
            await friend.connect(server.describe())
        for wrong in ("", "open sesam", "open sesame "):
            async with await start("intruder", transport, wrong) as intruder:
                with pytest.raises(AccessDenied):
                    await intruder.connect(server.describe())


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
    assert await ends(sock, within_s=2.5) == b""


async def test_too_many_connections_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await served.works()
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 1)
    async with await start("late") as late:
        with pytest.raises(PeerLost, match="connection to spare"):
            await late.connect(served.server.describe())


# ---------------------------------------------------------------------- requests and frames


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


def requests(region: int) -> dict[str, tuple[bytes, Status | None]]:
    """Requests a proved but broken or hostile peer may send, and what the answer is; None: it hangs up."""

    def ask(op: Op, *spans: tuple[int, int, int], nbytes: int | None = None, num: int | None = None) -> bytes:
        columns = Spans.of([Span(*span) for span in spans])
        total = sum(span[2] for span in spans) & ((1 << 64) - 1)
        request = Request(op, len(spans) if num is None else num, 1000, total if nbytes is None else nbytes)
        return request.pack() + pack_spans(columns)

    one = Request(Op.READ, 1, 1000, 8)
    return {
        "past the end": (ask(Op.READ, (region, NBYTES - 1, 2)), Status.BAD_SPAN),
        "far past the end": (ask(Op.READ, (region, 1 << 63, 2)), Status.BAD_SPAN),
        "sum overflows": (ask(Op.READ, (region, (1 << 64) - 1, 2)), Status.BAD_SPAN),
        "size overflows": (ask(Op.READ, (region, 1, (1 << 64) - 1), nbytes=1), Status.BAD_SPAN),
        "nothing": (ask(Op.READ, (region, 0, 0), nbytes=1), Status.BAD_SPAN),
        "unknown region": (ask(Op.READ, (region + 1, 0, 8)), Status.BAD_REGION),
        "sizes do not add up": (ask(Op.READ, (region, 0, 8), nbytes=9), None),
        "too many bytes": (ask(Op.READ, (region, 0, 8), nbytes=1 << 40), None),
        "too many spans": (ask(Op.READ, (region, 0, 8), num=1 << 31), None),
        "no span": (ask(Op.READ, nbytes=8), None),
        "unknown operation": (ask(Op.READ, (region, 0, 8)).replace(b"MPq2\x01", b"MPq2\x09"), None),
        "padding without bytes": (
            replace(one, padding=1).pack() + pack_spans(Spans.of([Span(region, 0, 8)])) + bytes(9),
            None,
        ),
        "a page of padding": (replace(one, op=Op.WRITE, padding=wire.PAGE_NBYTES).pack() + bytes(200), None),
        "not a request": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2, None),
        "write past the end": (ask(Op.WRITE, (region, NBYTES - 4, 8)) + bytes(8), Status.BAD_SPAN),
        "fetch and check from nowhere": (
            ask(Op.PULL_CHECKED, (region, 0, 8)) + bytes(12),
            Status.FAILED,
        ),
        "the end of itself": (wire.pack_end([7, 0], 1000), None),
        "the end of nothing": (Request(Op.END, 0, 1000, 8).pack(), None),
        "fetch from nowhere": (ask(Op.PULL, (region, 0, 8)) + bytes(12), Status.FAILED),
    }


@pytest.mark.parametrize("name", requests(1))
async def test_a_bad_request_is_refused_or_ends_the_connection(served: Served, name: str) -> None:
    request, status = requests(served.region.id)[name]
    loop = asyncio.get_running_loop()
    sock = await served.meet(Kind.DATA)
    await loop.sock_sendall(sock, request)
    if status is None:
        assert await ends(sock) == b""
    else:
        reply = Reply.unpack(await exactly(sock, wire.REPLY_NBYTES))
        assert reply.status == status
        assert await exactly(sock, reply.nbytes)
        # And the connection is good for the next one.
        good = Request(Op.READ, 1, 1000, 8).pack() + pack_spans(Spans.of([Span(served.region.id, 8, 8)]))
        await loop.sock_sendall(sock, good)
        assert Reply.unpack(await exactly(sock, wire.REPLY_NBYTES)) == Reply(Status.OK, 0, 8)
        assert await exactly(sock, 8) == served.region.array[8:16].tobytes()
        sock.close()
    await served.works()


u64 = st.one_of(st.integers(0, 2 * NBYTES), st.integers(0, (1 << 64) - 1))


@st.composite
def data_messages(draw: st.DrawFn, region: int) -> bytes:
    """Requests with anything in any field, cut off anywhere, with garbage behind."""
    spans = draw(
        st.lists(st.tuples(st.sampled_from([region, region + 1, 0]), u64, u64), min_size=1, max_size=4)
    )
    columns = Spans.of([Span(*span) for span in spans])
    request = Request(
        draw(st.sampled_from(Op)),
        draw(st.one_of(st.just(len(spans)), st.integers(0, (1 << 32) - 1))),
        draw(st.integers(0, 200)),
        draw(st.one_of(st.just(columns.total_nbytes), u64)),
        draw(st.one_of(st.just(0), st.integers(0, (1 << 16) - 1))),
    )
    message = request.pack() + pack_spans(columns) + draw(st.binary(max_size=64))
    return message[: draw(st.one_of(st.just(len(message)), st.integers(1, len(message))))]


@st.composite
def control_messages(draw: st.DrawFn) -> bytes:
    """Frames of any kind and length, right or not."""
    frames = []
    for _ in range(draw(st.integers(1, 5))):
        body = draw(st.binary(max_size=40))
        length = draw(st.one_of(st.just(len(body)), st.integers(0, (1 << 32) - 1)))
        # No notes, because no test reads them.
        frames.append(FRAME_HEADER.pack(length, draw(st.integers(2, 255))) + body)
    return b"".join(frames)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(data=st.data())
def test_any_message_of_an_authenticated_peer(data: st.DataObject) -> None:
    """Whatever it is: an answer or the end of the connection, not a byte changed, and others are served."""

    async def run() -> None:
        async with await start("server") as server, await start("client") as client:
            region = server.register(bytes(range(256)) * (NBYTES // 256), writable=False)
            served = Served(server, region, client)
            loop = asyncio.get_running_loop()
            for kind in (Kind.DATA, Kind.CONTROL, Kind.DATA):
                strategy = control_messages() if kind is Kind.CONTROL else data_messages(region.id)
                sock = await served.meet(kind)
                with contextlib.suppress(OSError):
                    await loop.sock_sendall(sock, data.draw(strategy))
                    sock.shutdown(socket.SHUT_WR)
                await ends(sock, within_s=20)
            with client.allocate(4096, "copy") as copy:
                peer = await client.connect(server.describe())
                await peer.read([Span(copy.id, 0, 4096)], [Span(region.id, 0, 4096)], deadline_s=5)
                assert copy.array.tobytes() == bytes(range(256)) * 16
            assert region.buffer == bytes(range(256)) * (NBYTES // 256)

    asyncio.run(run())


@hypothesis.given(st.binary(max_size=64), st.sampled_from([Request, Reply, wire.RegionInfo]))
def test_any_bytes_are_a_message_or_refused(
    body: bytes, kind: type[Request | Reply | wire.RegionInfo]
) -> None:
    nbytes = {Request: wire.REQUEST_NBYTES, Reply: wire.REPLY_NBYTES}.get(kind)
    if nbytes is not None:
        magic = b"MPq2" if kind is Request else b"MPr1"
        body = magic + (body + bytes(nbytes))[: nbytes - 4]
    try:
        message = kind.unpack(body)
    except wire.WireError:
        return
    if isinstance(message, Request | Reply):
        assert message.nbytes <= wire.MAX_CHECKED_NBYTES
        assert message.padding < wire.PAGE_NBYTES
    assert kind.unpack(message.pack()).pack() == message.pack()


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


async def exactly(sock: socket.socket, nbytes: int) -> bytes:
    received = b""
    async with asyncio.timeout(20):
        while len(received) < nbytes:
            part = await asyncio.get_running_loop().sock_recv(sock, nbytes - len(received))
            assert part, "hung up"
            received += part
    return received


async def test_random_bytes_on_a_proved_connection(served: Served) -> None:
    rng = random.Random(3)
    good = Request(Op.READ, 2, 100, 16).pack() + pack_spans(
        Spans.of([Span(served.region.id, 0, 8), Span(served.region.id, 64, 8)])
    )
    for turn in range(100):
        sock = await served.meet(Kind.DATA if turn % 2 else Kind.CONTROL)
        garbage = bytearray(good if turn % 3 else FRAME_HEADER.pack(4, 2) + rng.randbytes(200))
        for _ in range(rng.randrange(1, 6)):
            garbage[rng.randrange(len(garbage))] = rng.randrange(256)
        garbage = garbage[: rng.randrange(1, len(garbage) + 1)]
        await asyncio.get_running_loop().sock_sendall(sock, bytes(garbage))
        with contextlib.suppress(OSError):
            # It may have hung up by now.
            sock.shutdown(socket.SHUT_WR)
        await ends(sock, within_s=20)
    await served.works()


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


# ---------------------------------------------------------------------- descriptors


async def test_a_descriptor_survives_packing(served: Served) -> None:
    descriptor = served.server.describe()
    assert AgentDescriptor.unpack(descriptor.pack()) == descriptor
    assert len(descriptor.pack()) < 600


def changed(**fields: Any) -> bytes:
    whole = {
        "version": 1, "agent_id": "a", "epoch": 1, "incarnation": "00" * 16, "transports": ["tcp"],
        "boot_id": "", "unix_name": "", "tcp_host": "127.0.0.1", "tcp_port": 1,
    } | fields  # fmt: skip
    return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()


@pytest.mark.parametrize(
    "packed",
    [
        b"", b"\xff", b"[]", b"null", b"{}", b"[" * 3000, bytes(5000),
        *(changed(**{name: None}) for name in json.loads(changed())),
        changed(version=2), changed(agent_id=""), changed(agent_id="a" * 129), changed(agent_id="a\nb"),
        changed(agent_id=3), changed(epoch=-1), changed(epoch=1 << 64), changed(epoch=True),
        changed(epoch="1"),
        changed(incarnation="00" * 15), changed(incarnation="zz" * 16), changed(transports="tcp"),
        changed(transports=[1]), changed(transports=["x"] * 17), changed(tcp_port=65536),
        changed(unix_name="a\0b"), changed(tcp_host="h" * 256),
    ],
)  # fmt: skip
def test_invalid_descriptors_are_refused(packed: bytes) -> None:
    AgentDescriptor.unpack(changed())
    with pytest.raises(DescriptorError):
        AgentDescriptor.unpack(packed)


@hypothesis.given(st.binary(max_size=200))
def test_any_bytes_are_a_descriptor_or_refused(packed: bytes) -> None:
    with pytest.raises(DescriptorError):
        AgentDescriptor.unpack(packed)
