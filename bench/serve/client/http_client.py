"""A streaming HTTP/1.1 client that does almost nothing while it measures.

It uses the same cores as the server. On arrival it only notes the time and keeps the bytes; they are parsed
when the answer is complete (``moonpool.bench.serve.client.answer``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.security.https import client_context

_LAST_CHUNK = b"0\r\n\r\n"


class ServerUnreachable(MoonpoolError):
    """No connection, or it was lost before the answer was complete."""

    failure = FailureClass.CONDUCTOR


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
        self._on_packet: Callable[[], object] | None = None
        self._done: asyncio.Future[None] | None = None
        self._head_read = False
        self._chunked = False
        self._end = b""  # of the body so far
        self._remaining: int | None = None  # body bytes to come; None: unknown

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    async def exchange(self, request: bytes, on_packet: Callable[[], object] | None = None) -> Exchange:
        """Send ``request`` and wait for the whole answer. Raises ``ServerUnreachable``."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._exchange = exchange = Exchange(sent_s=time.perf_counter())
        self._on_packet = on_packet
        self._remaining = None
        self._head_read = False
        self._end = b""
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
        if self._on_packet is not None:
            self._on_packet()
        if not self._head_read:
            data = self._read_head(b"".join(packet for _, packet in exchange.packets))
        if self._remaining is not None:
            self._remaining -= len(data)
        elif self._chunked:
            # No event within a stream ends like this: events end in a brace and line feeds.
            self._end = (self._end + data[-len(_LAST_CHUNK) :])[-len(_LAST_CHUNK) :]
            if self._end == _LAST_CHUNK:
                self._remaining = 0
        if self._remaining is not None and self._remaining <= 0:
            self._finish(now)

    def _read_head(self, data: bytes) -> bytes:
        """Read the head, if it is complete. Returns the part of the body in ``data``."""
        head, separator, body = data.partition(b"\r\n\r\n")
        self._head_read = bool(separator)
        self._chunked = b"transfer-encoding: chunked" in head.lower()
        for line in head.lower().split(b"\r\n"):
            if self._head_read and line.startswith(b"content-length:"):
                self._remaining = int(line[15:])
            elif line.startswith(b"http/1.0") or (line.startswith(b"connection:") and b"close" in line):
                self.reusable = False  # HTTP/1.0 closes without a header
        return body

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._exchange is not None and self._head_read and self._remaining is None and not self._chunked:
            # HTTP/1.0 without a length: the answer ends with the connection.
            self._finish(self._exchange.packets[-1][0])
        elif self._done is not None and not self._done.done():
            reason = exc or "closed"
            self._done.set_exception(
                ServerUnreachable(f"the connection ended before the answer did: {reason}")
            )

    def _finish(self, done_s: float) -> None:
        assert self._exchange is not None and self._done is not None
        self._exchange.done_s = done_s
        if not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class HttpClient:
    """Keep-alive connections to one server, one for each request in flight. Use as ``async with``."""

    def __init__(self, url: str, *, api_key: str = "", ca: str = "") -> None:
        """ca: file of the authorities to trust; empty: see ``runtime.security.https``."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerUnreachable(f"{url!r} is no http URL")
        self._tls = client_context(ca) if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (80 if self._tls is None else 443)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc}\r\n" + (f"Authorization: Bearer {api_key}\r\n" * bool(api_key))
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.drop_idle()

    def drop_idle(self) -> None:
        """Close the connections that carry no request."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def get(self, path: str) -> Exchange:
        return await self._send(f"GET {self._base}{path} HTTP/1.1\r\n{self._headers}\r\n".encode())

    async def post(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        on_packet: Callable[[], object] | None = None,
    ) -> Exchange:
        """Send a JSON body. ``on_packet``: called at each arrival of a part of the answer.

        Raises:
            ServerUnreachable: no connection, or it was lost; the request may have had an effect.
        """
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}{more}Content-Type: application/json\r\n"
        return await self._send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, on_packet)

    async def _send(self, request: bytes, on_packet: Callable[[], object] | None = None) -> Exchange:
        self._drop_closed()
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            exchange = await connection.exchange(request, on_packet)
        except BaseException:
            # Also on cancellation: a closed connection tells the server to stop.
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return exchange

    async def _connect(self) -> _Connection:
        context = self._tls
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
        """Open connections ahead, so that none is opened during a measurement."""
        self._drop_closed()
        missing = count - len(self._idle)
        self._idle += await asyncio.gather(*(self._connect() for _ in range(missing)))
