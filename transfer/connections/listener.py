"""The listening sockets of an agent. Clients that do not authenticate cannot delay others."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from moonpool.runtime.network.sockets import prepare
from moonpool.runtime.network.tls import secure
from moonpool.transfer import metrics
from moonpool.transfer.connections.handshake import Authenticated, Identity, handshake_as_server
from moonpool.transfer.errors import TransferError

_log = logging.getLogger(__name__)

HANDSHAKE_S = 3.0
MAX_UNAUTHENTICATED = 64
"""Limit of connections in the handshake; one more closes the oldest."""
MAX_CONNECTIONS = 1024
_ACCEPTS_A_TURN = 16
_PAUSE_S = 0.1


class Listener:
    """Listening sockets and handshakes in progress. Belongs to the event loop's thread."""

    def __init__(
        self,
        me: Identity,
        secret: str,
        admit: Callable[[socket.socket, Authenticated], None],
        num_connections: Callable[[], int],
        tls: ssl.SSLContext | None,
    ) -> None:
        """admit: takes over the socket of each authenticated client. tls: not used for Unix sockets."""
        self._tls = tls
        self._me = me
        self._secret = secret
        self._admit = admit
        self._num_connections = num_connections
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._unauthenticated: dict[asyncio.Task[None], None] = {}
        self._closed = False

    def listen_unix(self, name: str) -> None:
        """Listen at an abstract name. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"\0{name}")
        except BaseException:
            sock.close()
            raise
        self._listen(sock)

    def listen_tcp(self, host: str) -> int:
        """Listen on a free port, and return it. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family)
        self._listen(sock)
        return int(sock.getsockname()[1])

    def _listen(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.listen(512)
        self._listening.append(sock)
        self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Most likely out of descriptors. The listener stays readable, so pause instead of spinning.
                _log.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(_PAUSE_S, self._resume, listening)
                return
            prepare(sock)
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                next(iter(self._unauthenticated)).cancel()
            task = self._loop.create_task(self._authenticate(sock))
            self._unauthenticated[task] = None
            task.add_done_callback(lambda task: self._unauthenticated.pop(task, None))

    def _resume(self, listening: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    async def _authenticate(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                if self._tls is not None and sock.family != socket.AF_UNIX:
                    sock = await secure(sock, self._tls, server=True)
                busy = self._num_connections() >= MAX_CONNECTIONS
                remote = await handshake_as_server(sock, self._me, self._secret, busy=busy)
        except (OSError, TransferError, TimeoutError) as error:
            sock.close()
            metrics.REFUSED.inc()
            _log.debug("a connection was refused: %s", error)
        except BaseException:
            sock.close()
            raise
        else:
            self._admit(sock, remote)

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        for sock in self._listening:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._listening.clear()
        for task in list(self._unauthenticated):
            task.cancel()
        if self._unauthenticated:
            await asyncio.wait(list(self._unauthenticated))
