"""Requests and frames of an authenticated peer that are malformed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest

from moonpool.transfer import (
    Span,
    Spans,
)
from moonpool.transfer.connections import wire
from moonpool.transfer.connections.wire import FRAME_HEADER, Kind, Op, Reply, Request, Status, pack_spans
from tests.transfer.safety.served import NBYTES, Served, ends, exactly, start


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


@pytest.mark.slow
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
