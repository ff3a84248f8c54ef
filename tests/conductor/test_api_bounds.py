"""What one client can send, and how slowly: it is refused in words, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from moonpool.conductor.api import request_body
from moonpool.conductor.dashboard.routes import FEED, LiveFeed, pause_s
from moonpool.conductor.text.chat_template import ChatTemplate
from moonpool.conductor.text.tokenizer import Tokenizer
from moonpool.runtime.config.options import ConductorOptions
from moonpool.runtime.network import http_connections
from moonpool.runtime.network.quota import ConnectionQuota, origin
from tests.conductor.conftest import serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": "tiny", "prompt": "In the", "max_tokens": 1}


async def connect(api: Any, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write(sent)
    return reader, writer


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth - 1):
        value = [value] if level % 2 else {"inner": value}
    return value


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP, gzip"])
async def test_compressed_bodies_are_refused_unopened(api: Any, encoding: str) -> None:
    body = json.dumps(BODY).encode()
    packed = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
    headers = {"Content-Encoding": encoding}
    async with api.client.post(api.url + COMPLETIONS, data=packed, headers=headers) as response:
        answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (415, "unsupported_encoding")
        assert "compressed" in answer["error"]["message"]
    headers = {"Content-Encoding": "identity"}
    async with api.client.post(api.url + COMPLETIONS, data=body, headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize("depth", [33, 500, 1000])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "surprise", "metadata"])
async def test_a_deep_body_is_refused(api: Any, field: str, depth: int) -> None:
    raw = orjson.dumps({"messages": [{"role": "user", "content": "x"}]})[:-1]
    opened = b'{"a":[' * (depth // 2) + b"1" + b"]}" * (depth // 2)
    raw += b',"%s":{"x":%s}}' % (field.encode(), opened)
    async with api.client.post(api.url + CHAT, data=raw) as response:
        answer = await response.json()
        assert response.status == 400, answer
        assert "nested more than 32 deep" in answer["error"]["message"]


def seen_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """The threads that call the function from now on, one entry a call."""
    function, threads = getattr(owner, name), list[int]()

    def called(*args: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return function(*args, **options)

    monkeypatch.setattr(owner, name, called)
    return threads


@pytest.mark.parametrize(("num", "length"), [(100, 8000), (2000, 1)])
async def test_many_prompts_are_not_read_on_the_event_loop(
    checkpoint: Path, num: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(checkpoint, ConductorOptions(port=0, max_body_nbytes=8 << 20)) as api:
        api.core.model = replace(api.core.model, max_model_len=1 << 16)
        api.core.script = lambda request: [5]
        threads = seen_in(monkeypatch, Tokenizer, "encode_now")
        answer = await api.complete(prompt=["x" * length] * num, max_tokens=1)
        assert len(answer["choices"]) == len(threads) == num
        assert threading.get_ident() not in threads
        threads.clear()
        await api.complete(prompt=["a", "b"], max_tokens=1)
        assert threads == [threading.get_ident()] * 2


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/responses"])
async def test_many_messages_are_not_read_on_the_event_loop(
    checkpoint: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(checkpoint, ConductorOptions(port=0, max_body_nbytes=8 << 20)) as api:
        api.core.model = replace(api.core.model, max_model_len=1 << 16)
        name = "input" if path == "/v1/responses" else "messages"
        stages = [
            seen_in(monkeypatch, owner, function)
            for owner, function in ((request_body, "parse"), (ChatTemplate, "render"))
        ]
        for num, apart in ((1000, True), (2, False)):
            body = {name: [{"role": "user", "content": "a"}] * num}
            status, answer = await api.post(path, body)
            assert status == 200, answer
            assert [threads.pop() != threading.get_ident() for threads in stages] == [apart, apart]


async def test_a_deep_prompt_is_no_prompt_and_flat_bodies_are_fine(api: Any) -> None:
    status, answer = await api.post(COMPLETIONS, {**BODY, "prompt": nested(900)})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    status, _ = await api.post(COMPLETIONS, {**BODY, "surprise": nested(32)})
    assert status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Large: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\n" + b"X-Many: x\r\n" * 200 + b"\r\n",
    ],
    ids=["line", "header", "headers"],
)
async def test_a_head_has_a_greatest_size(api: Any, head: bytes) -> None:
    reader, writer = await connect(api, head)
    assert b" 400 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    "drip", [b"", b"GET /", b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Slow: "], ids=["silent", "line", "header"]
)
async def test_a_slow_head_is_not_waited_for(api: Any, drip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "HEAD_S", 0.2)
    reader, writer = await connect(api)

    async def dripping() -> None:
        with pytest.raises(ConnectionError):
            while drip:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)

    writer.write(drip)
    slow = asyncio.create_task(dripping()) if drip else None
    await api.complete(max_tokens=1)
    async with asyncio.timeout(30):
        # What drips on may turn the end into a reset.
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    if slow is not None:
        slow.cancel()
        await asyncio.wait([slow])
    writer.close()


async def test_a_second_head_has_the_same_time_and_an_idle_connection_more(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "HEAD_S", 0.1)
    request = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    reader, writer = await connect(api, request)
    async with asyncio.timeout(30):
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)  # it is idle for longer than a head may take
        await reader.read(1000)
        writer.write(request)
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(request[:9])
        await reader.read()
    writer.close()


async def test_a_slow_body_is_not_waited_for(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_S", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{"
    reader, writer = await connect(api, head)
    async with asyncio.timeout(30):
        answer = await reader.readuntil(b"}}")
    assert b" 408 " in answer.splitlines()[0]
    assert b"did not arrive within 0.2 s" in answer
    writer.close()
    assert not api.core.requests


async def test_one_address_cannot_take_the_connections_of_others(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.server._runner, "_quota", quota := ConnectionQuota(8))
    monkeypatch.setattr(api.server._runner.server, "_quota", quota)
    flood = [await connect(api) for _ in range(20)]
    async with asyncio.timeout(30):
        refused = [await reader.read() for reader, _ in flood[4:]]
        assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in refused)
        assert b"127.0.0.1 has 4 connections open, the most for one address" in refused[0]
        # From another address there is room.
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", api.server.port, local_addr=("127.0.0.2", 0)
        )
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert b" 200 " in (await reader.read()).splitlines()[0]
        for _, other in (*flood, (reader, writer)):
            other.close()
        while len(quota):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await api.complete(max_tokens=1)


async def test_a_page_that_stops_reading_is_disconnected(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def next_event(feed: LiveFeed, scope: str | None) -> bytes:
        await asyncio.sleep(0)
        return bytes(1 << 20)

    monkeypatch.setattr(LiveFeed, "next", next_event)
    monkeypatch.setattr(LiveFeed, "event", lambda feed, scope: b"")
    async with serving(checkpoint, ConductorOptions(port=0, write_timeout_s=0.3)) as api:
        feed = api.server._runner.app[FEED]
        _, writer = await connect(api, b"GET /v1/live HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(30):
            while not feed._viewers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while feed._viewers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.close()


def test_snapshots_that_cost_much_come_less_often() -> None:
    assert pause_s(0.0) == pause_s(0.01) == 1.0
    assert pause_s(0.03) == pytest.approx(3.0)  # 1 % of a core
    assert pause_s(10.0) == 5.0


def test_connections_count_by_address() -> None:
    assert origin(("10.0.0.1", 5)) == "10.0.0.1"
    assert origin(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1"
    assert origin(("2001:db8::1", 5, 0, 0)) == origin(("2001:db8::ffff", 9, 0, 0)) == "2001:db8::/64"
    assert origin(("fe80::1%eth0", 5, 0, 2)) == "fe80::/64"
    assert origin("") == origin(None) == "local"
    quota = ConnectionQuota(4)
    assert [bool(quota.enter("a")) for _ in range(3)] == [False, False, True]
    assert [bool(quota.enter(name)) for name in "bcd"] == [False, False, True]
    assert "the most of this process" in quota.enter("e")
    quota.leave("a")
    assert not quota.enter("e")
