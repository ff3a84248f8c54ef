"""Options of the sockets between agents."""

from __future__ import annotations

import socket
import struct

# A dead link is noticed by the kernel after idle + interval * probes seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
# Of struct tcp_info: tcpi_bytes_acked and tcpi_bytes_received.
_ACKED_AND_RECEIVED = struct.Struct("120xQQ")


def prepare(sock: socket.socket) -> None:
    """Non-blocking; over TCP also without delay, and closed by the kernel when the other host is gone."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def moved_nbytes(sock: socket.socket) -> int:
    """Bytes that a TCP connection has received, and had acknowledged, so far. 0 once it is closed."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AND_RECEIVED.size)
    except OSError:
        return 0
    return sum(_ACKED_AND_RECEIVED.unpack(info))
