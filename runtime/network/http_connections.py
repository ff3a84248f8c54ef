"""HTTP connections within bounds: their number by address, the size of a head and the time it may take."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any, Final, cast

from aiohttp import web

from moonpool.runtime.network.quota import ConnectionQuota, origin

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 8192
"""Half of the process's descriptors where that is less: clients must not take those of nodes and files."""
HEAD_S: Final = 10.0
"""From a connection, or the first byte of a request, to the end of its headers."""
KEEPALIVE_S: Final = 620.0  # beyond the 600 s of common load balancers, which must close first
# As aiohttp's defaults, which may change: with all three a head has at most a mebibyte.
_HEAD_BOUNDS: dict[str, Any] = {"max_line_size": 8190, "max_field_size": 8190, "max_headers": 128}
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
)


class _Connection(web.RequestHandler):
    """Refused at once where the quota is full; closed where a head takes too long."""

    __slots__ = ("_address", "_quota", "_timer")

    def __init__(self, server: BoundedServer, quota: ConnectionQuota, **options: Any) -> None:
        super().__init__(server, **options)
        self._quota = quota
        self._address: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        address = origin(transport.get_extra_info("peername"))
        if reason := self._quota.enter(address):
            log.warning("a connection is refused: %s", reason)
            transport.write(_BUSY % (len(reason) + 1, reason.encode() + b"\n"))
            self.force_close()
            return
        self._address = address
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._within_request:
            self._stop_waiting()
        elif self._timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        if self._address is not None:
            self._quota.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    @property
    def _within_request(self) -> bool:
        return self._current_request is not None or bool(self._messages)

    def _wait_for_head(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEAD_S, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if not self._within_request:
            log.debug("a connection from %s is closed: no request within %g s", self._address, HEAD_S)
            self.force_close()


class BoundedServer(web.Server):
    """``server``, with other connections."""

    def __init__(self, server: web.Server, quota: ConnectionQuota) -> None:
        self._options = server._kwargs
        super().__init__(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **self._options,
        )
        self._quota = quota

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._quota, loop=asyncio.get_running_loop(), **self._options)


class BoundedRunner(web.AppRunner):
    """An ``AppRunner`` with limits on its connections. It leaves compressed bodies as they came."""

    __slots__ = ("_quota",)

    def __init__(self, app: web.Application, **options: Any) -> None:
        super().__init__(app, keepalive_timeout=KEEPALIVE_S, auto_decompress=False, **_HEAD_BOUNDS, **options)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._quota = ConnectionQuota(max(min(MAX_CONNECTIONS, files // 2), 2))

    async def _make_server(self) -> web.Server:
        return BoundedServer(await super()._make_server(), self._quota)
