"""A streaming HTTP/1.1 client that does almost nothing while it measures.

It shares the cores with what it measures, so on arrival it only notes the time and keeps the bytes; they are
parsed when the answer is complete and nothing is timed any more (``moonpool.bench.serve.client.answer``).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from moonpool.runtime.errors import MoonpoolError

_LAST_CHUNK = b"0\r\n\r\n"


class ServerUnreachable(MoonpoolError):
    """No connection, or it was lost before the answer was complete."""


@dataclass(slots=True)
class Exchange:
    """One request and the raw answer. ``packets``: (``time.perf_counter`` seconds at arrival, bytes)."""

    sent_s: float = 0.0
    done_s: float = 0.0
    packets: list[tuple[float, bytes]] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    """One keep-alive connection; carries one exchange at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._head_read = False
        self._chunked = False
        self._remaining: int | None = None  # body bytes still to come; None: nobody said

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but says it is not

    async def exchange(self, request: bytes) -> Exchange:
        """Send ``request`` and wait for the whole answer.

        Raises:
            ServerUnreachable: the connection ended first.
        """
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._exchange = exchange = Exchange(sent_s=time.perf_counter())
        self._remaining = None
        self._head_read = False
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._exchange = None
        return exchange

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        exchange = self._exchange
        if exchange is None:
            return
        exchange.packets.append((now, data))
        if not self._head_read:
            data = self._read_head(b"".join(packet for _, packet in exchange.packets))
        if self._remaining is not None:
            self._remaining -= len(data)
        elif self._chunked and data.endswith(_LAST_CHUNK):
            # An event ends in a brace and line feeds, so nothing within a stream looks like this.
            self._remaining = 0
        if self._remaining is not None and self._remaining <= 0:
            exchange.done_s = now
            self._finish(None)

    def _read_head(self, data: bytes) -> bytes:
        """Take in the head, if it is complete; what of the body came with it."""
        head, separator, body = data.partition(b"\r\n\r\n")
        self._head_read = bool(separator)
        self._chunked = b"transfer-encoding: chunked" in head.lower()
        for line in head.lower().split(b"\r\n"):
            if self._head_read and line.startswith(b"content-length:"):
                self._remaining = int(line[15:])
            elif line.startswith(b"http/1.0") or (line.startswith(b"connection:") and b"close" in line):
                self.reusable = False  # HTTP/1.0 closes without saying so
        return body

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        exchange = self._exchange
        if exchange is not None and self._head_read and self._remaining is None and not self._chunked:
            # Neither a length nor chunks: HTTP/1.0, whose answers end with the connection.
            exchange.done_s = exchange.packets[-1][0]
            self._finish(None)
        self._finish(ServerUnreachable(f"the connection ended before the answer did: {exc or 'closed'}"))

    def _finish(self, error: ServerUnreachable | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class HttpClient:
    """Keep-alive connections to one server; as many as are in use at once. Use as ``async with``."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerUnreachable(f"{url!r} is no http URL")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc}\r\n" + (f"Authorization: Bearer {api_key}\r\n" * bool(api_key))
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for connection in self._idle:
            connection.close()

    async def get(self, path: str) -> Exchange:
        return await self._send(f"GET {self._base}{path} HTTP/1.1\r\n{self._headers}\r\n".encode())

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Exchange:
        """Send a JSON body.

        Raises:
            ServerUnreachable: no connection, or lost on the way; the request may have had an effect.
        """
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}{more}Content-Type: application/json\r\n"
        return await self._send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def _send(self, request: bytes) -> Exchange:
        self._drop_closed()
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            exchange = await connection.exchange(request)
        except BaseException:
            # Also when cancelled: closing the connection is how a server learns that nobody waits any more.
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return exchange

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self._secure else None
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=context)
        except OSError as error:
            raise ServerUnreachable(f"cannot connect to {self._host}:{self._port}: {error}") from error
        return connection

    def _drop_closed(self) -> None:
        """Servers close connections that were idle for some seconds."""
        self._idle = [connection for connection in self._idle if connection.reusable]

    async def warm(self, count: int) -> None:
        """Open connections ahead, so that none is opened while something is measured."""
        self._drop_closed()
        missing = count - len(self._idle)
        self._idle += await asyncio.gather(*(self._connect() for _ in range(missing)))
