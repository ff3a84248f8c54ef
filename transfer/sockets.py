"""Options of the sockets between agents."""

from __future__ import annotations

import socket

# A dead link is noticed by the kernel after idle + interval * probes seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def prepare(sock: socket.socket) -> None:
    """Non-blocking; over TCP also without delay, and closed by the kernel when the other host is gone."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
