"""One of the addresses of a peer: most often one of its network interfaces."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from moonpool.transfer.connections.backoff import Backoff


@dataclass(slots=True, eq=False)
class Rail:
    """connect: given a number for the connection, gives a socket after its handshake. num_streams: there are
    so many connections now.
    """

    connect: Callable[[int], Awaitable[socket.socket]]
    backoff: Backoff = field(default_factory=Backoff)
    num_streams: int = 0
    connecting: asyncio.Task[None] | None = None
