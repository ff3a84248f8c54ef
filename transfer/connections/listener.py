"""The listening sockets of an agent. Clients that do not authenticate cannot delay others."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable

from moonpool.runtime.network.quota import origin
from moonpool.runtime.network.sockets import prepare
from moonpool.runtime.observing import audit
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.tls import secure
from moonpool.transfer import metrics
from moonpool.transfer.connections.handshake import Authenticated, Identity, handshake_as_server, peer_pid
from moonpool.transfer.connections.wire import Kind
from moonpool.transfer.errors import TransferError

_log = logging.getLogger(__name__)

HANDSHAKE_S = 3.0
MAX_UNAUTHENTICATED = 64
"""Limit of connections in the handshake; one more closes the oldest of the address that has the most."""
MAX_CONNECTIONS = 1024
"""Of all agents, half of them for control; one more ends the TCP data connection that is idle longest."""
MAX_PEER_CONNECTIONS = 256
"""Of one agent: 2 streams to each of 16 addresses, for several transports, and those that are just ending."""
_ACCEPTS_A_TURN = 16
_PAUSE_S = 0.1


class Listener:
    """Listening sockets and handshakes in progress. Belongs to the event loop's thread."""

    def __init__(
        self,
        me: Identity,
        security: Security,
        admit: Callable[[socket.socket, Authenticated], None],
        num_connections: Callable[[bytes], tuple[int, int, int]],
        end_idle: Callable[[int], None],
    ) -> None:
        """admit: takes over the socket of each authenticated client. num_connections: all but those that
        ``end_idle`` can end, those for control, and those of the agent with an incarnation. end_idle: ends
        idle connections while more than a number are open. Unix sockets are without TLS."""
        self._me = me
        self._security = security
        self._admit = admit
        self._num_connections = num_connections
        self._end_idle = end_idle
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._unauthenticated: dict[asyncio.Task[None], str] = {}  # and the address it came from
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
                sock, peername = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Most likely out of descriptors. The listener stays readable, so pause instead of spinning.
                _log.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(_PAUSE_S, self._resume, listening)
                return
            prepare(sock)
            address = f"process {peer_pid(sock)}" if sock.family == socket.AF_UNIX else origin(peername)
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                self._make_room()
            task = self._loop.create_task(self._authenticate(sock, address))
            self._unauthenticated[task] = address
            task.add_done_callback(lambda task: self._unauthenticated.pop(task, None))

    def _make_room(self) -> None:
        """End a handshake. Those of an address with one are not ended while another address has several."""
        by_address = Counter(self._unauthenticated.values())
        most = max(by_address.values())
        victim = next(task for task, address in self._unauthenticated.items() if by_address[address] == most)
        # It is counted no longer, though it ends later in this turn of the loop.
        del self._unauthenticated[victim]
        victim.cancel()

    def _resume(self, listening: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    async def _authenticate(self, sock: socket.socket, address: str) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                if sock.family != socket.AF_UNIX and (tls := self._security.tls) is not None:
                    sock = await secure(sock, tls, server=True)
                remote = await handshake_as_server(sock, self._me, self._security, busy=self._is_busy)
        except (OSError, TransferError, TimeoutError) as error:
            sock.close()
            metrics.REFUSED.inc()
            _log.debug("a connection was refused: %s", error)
            audit.refused(
                "transfer", str(error) or "it said nothing in time", origin=address, kind="transfer"
            )
        except BaseException:
            sock.close()
            raise
        else:
            # Only now: a client that cannot prove itself must not end the connections of others.
            self._end_idle(MAX_CONNECTIONS - 1)
            self._admit(sock, remote)

    def _is_busy(self, kind: int, incarnation: bytes) -> bool:
        num, num_controls, num_of_peer = self._num_connections(incarnation)
        # Controls are never ended, and must leave room for the data of their peers.
        crowded = kind == Kind.CONTROL and num_controls >= (MAX_CONNECTIONS + 1) // 2
        return crowded or num >= MAX_CONNECTIONS or num_of_peer >= MAX_PEER_CONNECTIONS

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
