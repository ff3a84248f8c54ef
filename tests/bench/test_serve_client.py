"""The benchmark's HTTP client and its reading of answers, against real sockets and by law."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.bench.serve.client.answer import AnswerInvalid, read_answer, read_json, read_text
from moonpool.bench.serve.client.cluster import CPU_S, MetricsPages
from moonpool.bench.serve.client.http_client import Exchange, HttpClient, ServerUnreachable
from moonpool.bench.serve.client.server import RequestFailed, Server
from tests.bench.fake_server import MODEL, FakeServer

EVENTS = [
    b'{"id":"a","choices":[{"text":"In","token_ids":[5]}]}',
    b'{"id":"a","choices":[{"text":" the","token_ids":[6,7],"finish_reason":"stop"}]}',
    b'{"id":"a","choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":2}}}',
    b"[DONE]",
]
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def framed(chunks: list[bytes]) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]


def exchange(raw: bytes, cuts: list[int]) -> Exchange:
    """``raw`` in packets that arrive at 0.0, 1.0, …"""
    edges = [0, *sorted({cut for cut in cuts if cut < len(raw)}), len(raw)]
    packets = [(float(number), raw[start:end]) for number, (start, end) in enumerate(pairwise(edges))]
    return Exchange(sent_s=-1.0, done_s=9.0, packets=packets)


@given(st.sampled_from([b"\n", b"\r\n"]), st.integers(1, 400), st.lists(st.integers(1, 900), max_size=8))
def test_an_answer_reads_the_same_however_it_is_cut(newline: bytes, size: int, cuts: list[int]) -> None:
    body = b"".join(b"data: " + event + newline * 2 for event in EVENTS)
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    raw = CHUNKED_HEAD + b"".join(framed(chunks)) + b"0\r\n\r\n"
    answer = read_answer(exchange(raw, cuts))
    assert (answer.text, answer.token_ids, answer.output_tokens) == ("In the", (5, 6, 7), 3)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.finish_reason) == (4, 2, "stop")
    assert answer.error == ""
    assert len(answer.token_s) == 2


@given(st.lists(st.integers(1, 900), max_size=8))
def test_an_event_arrives_with_its_last_byte(cuts: list[int]) -> None:
    chunks = framed([b"data: " + event + b"\n\n" for event in EVENTS])
    raw = CHUNKED_HEAD + b"".join(chunks) + b"0\r\n\r\n"
    cut_up = exchange(raw, cuts)
    answer = read_answer(cut_up)
    ends = [len(CHUNKED_HEAD) + len(b"".join(chunks[: number + 1])) - len(b"\r\n") for number in range(2)]
    for arrived_s, end in zip(answer.token_s, ends, strict=True):
        received = b"".join(data for at_s, data in cut_up.packets if at_s <= arrived_s)
        before = b"".join(data for at_s, data in cut_up.packets if at_s < arrived_s)
        assert len(before) < end <= len(received)


@pytest.mark.parametrize("error", ['"overloaded"', '{"message": "overloaded"}'])
def test_an_error_in_a_stream_is_an_answer(error: str) -> None:
    raw = b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": %s}\n\n' % error.encode()
    assert read_answer(exchange(raw, [])).error == "overloaded"


def test_an_error_is_an_answer() -> None:
    raw = b'HTTP/1.1 404 Not Found\r\nContent-Length: 33\r\n\r\n{"error":{"message":"no model x"}}'
    assert read_answer(exchange(raw, [])).error == "status 404: no model x"
    with pytest.raises(AnswerInvalid):
        read_answer(exchange(b"SSH-2.0-OpenSSH\r\n\r\n", []))


async def test_requests_go_out_together_and_are_parsed(fake: FakeServer) -> None:
    async with HttpClient(fake.url + "/v1/") as http:
        server = await Server.find("fake", http)
        fake.party = 3
        outcome = await server.ask_all([[1, 2], [3, 4], [5, 6]], 5)
        answer = await server.ask([1, 2, 3], 2, request_id="mine")
    assert [len(one.token_ids) for one in outcome.answers] == [5, 5, 5]
    assert (answer.token_ids, answer.prompt_tokens, answer.cached_tokens) == ((7, 8), 3, 3)
    assert answer.sent_s <= answer.token_s[0] <= answer.token_s[1] <= answer.done_s
    asked = fake.asked[-1]
    assert (asked["model"], asked["request_id"], asked["ignore_eos"]) == (MODEL, "mine", True)


async def test_plain_sends_no_field_of_ours(fake: FakeServer) -> None:
    async with HttpClient(fake.url) as http:
        server = await Server.find("fake", http, model="m", plain=True)
        await server.ask([1, 2, 3], 1)
    assert len(fake.asked[0]["prompt"].split(" ")) == 3
    assert {*fake.asked[0]} - {"request_id"} == {
        *("model", "prompt", "max_tokens", "temperature", "stream", "stream_options")
    }


async def test_refused_requests_raise(fake: FakeServer) -> None:
    fake.failing = True
    async with HttpClient(fake.url) as http:
        server = await Server.find("fake", http)
        with pytest.raises(RequestFailed, match="status 429: too many"):
            await server.ask([1], 1)


async def test_metrics_are_read_of_every_process_and_a_refusal_is_no_figure(fake: FakeServer) -> None:
    async with HttpClient(fake.url) as http:
        pages = await MetricsPages.of(await Server.find("fake", http))
        assert pages is not None
        assert await pages.total(CPU_S) == 3.0  # the fake is the API and a node at the same time
        with pytest.raises(AnswerInvalid, match="status 404"):
            read_text(await http.get("/no-such-page"))


async def test_nobody_there_is_said() -> None:
    async with HttpClient("http://127.0.0.1:1") as http:
        with pytest.raises(ServerUnreachable, match="cannot connect"):
            await http.get("/")


@pytest.mark.parametrize(
    "raw", [b"", CHUNKED_HEAD + b"5\r\nhel", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"]
)
async def test_a_lost_connection_is_an_error(raw: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        host, port = listener.sockets[0].getsockname()
        async with HttpClient(f"http://{host}:{port}") as http:
            with pytest.raises(ServerUnreachable, match="ended before"):
                await http.get("/")


def test_a_chunked_json_answer_is_read() -> None:
    raw = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(framed([b'{"a"', b": 1}"]))
        + b"0\r\n\r\n"
    )
    assert read_json(exchange(raw, [50, 60])) == (200, {"a": 1})


async def test_a_head_that_ends_like_a_last_chunk_is_not_the_end() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED_HEAD[:-2] + b"Retries: 0\r\n\r\n")
        await writer.drain()
        await gate.wait()
        writer.write(b"".join(framed([b'{"a": 1}'])) + b"0\r\n\r\n")
        writer.close()

    gate = asyncio.Event()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        host, port = listener.sockets[0].getsockname()
        async with HttpClient(f"http://{host}:{port}") as http:
            asking = asyncio.create_task(http.get("/"))
            done, _ = await asyncio.wait([asking], timeout=0.1)
            assert not done
            gate.set()
            assert read_json(await asking) == (200, {"a": 1})


@pytest.mark.parametrize("cut", [1, 3, 4])
async def test_the_last_chunk_may_come_in_two_packets(cut: int) -> None:
    events = framed([b"data: " + event + b"\n\n" for event in EVENTS])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED_HEAD + b"".join(events) + b"0\r\n\r\n"[:cut])
        await writer.drain()
        await first_part.wait()
        writer.write(b"0\r\n\r\n"[cut:])
        await reader.read()  # the connection stays open
        writer.close()

    first_part = asyncio.Event()
    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    async with listener, HttpClient(f"http://{host}:{port}") as http:
        async with asyncio.timeout(60):
            answer = await http.post("/v1/completions", b"", on_packet=first_part.set)
    assert read_answer(answer).token_ids == (5, 6, 7)


async def test_without_length_or_chunks_the_end_is_the_connections() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n[1, ")
        await writer.drain()
        writer.write(b"2]")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        host, port = listener.sockets[0].getsockname()
        async with HttpClient(f"http://{host}:{port}") as http:
            assert read_json(await http.get("/")) == (200, [1, 2])
            assert read_json(await http.get("/")) == (200, [1, 2])


async def test_after_a_pause_no_connection_from_before_is_used() -> None:
    """A server that was stopped closes them when it goes on, each at the next request perhaps."""
    paused = False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = not paused
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                if paused and before:
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, HttpClient(f"http://127.0.0.1:{port}") as http:
        await http.warm(2)
        await asyncio.gather(http.get("/"), http.get("/"))
        paused = True
        http.drop_idle()
        await asyncio.gather(http.get("/"), http.get("/"))
