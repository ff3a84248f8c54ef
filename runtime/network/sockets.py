"""TCP and Unix sockets: their options, and sending and receiving with or without TLS."""

from __future__ import annotations

import asyncio
import errno
import functools
import ipaddress
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

from moonpool.runtime.errors import ConfigError, MoonpoolError, PortInUse

T = TypeVar("T")

# The kernel notices a dead link after idle + interval * probes seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def loopback_only(host: str) -> bool:
    """Whether sockets that listen at ``host`` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host``, an address of this machine, that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def check_free(host: str, port: int) -> None:
    """Raise OSError if no socket can listen there now: the port is free at all addresses of ``host``, and one
    is this machine's."""
    errors: list[OSError] = []
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:  # else :: takes the port of 0.0.0.0, too
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            errors.append(error)  # as for :: where there is no IPv6
    if len(errors) == len(found):
        raise errors[0]


def no_listener(error: OSError, host: str, port: int, host_option: str, port_option: str) -> MoonpoolError:
    """Why a process does not listen there: ``PortInUse``, or a ``ConfigError`` that names the options."""
    if error.errno == errno.EADDRINUSE:
        return PortInUse(host, port, port_option)
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return ConfigError(
            f"{host} is no address of this machine ({error.strerror}): set {host_option} to one", host_option
        )
    return ConfigError(
        f"cannot listen at port {port} on {host} ({error.strerror}): set another {port_option} or "
        f"{host_option}",
        host_option,
    )


def host_port(host: str, port: int) -> str:
    """``host:port``, as URLs and gRPC take it: with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def prepare(sock: socket.socket) -> None:
    """Make ``sock`` non-blocking; over TCP also disable Nagle's algorithm and enable keep-alive."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def send_all(sock: socket.socket, message: bytes) -> None:
    """Send on a non-blocking socket. Raises OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        await asyncio.get_running_loop().sock_sendall(sock, message)
        return
    left = message
    while left:
        left = left[await tls_retried(sock, functools.partial(sock.send, left)) :]


async def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Receive on a non-blocking socket. Raises OSError; ConnectionResetError when the stream ends first."""
    received = b""
    while len(received) < nbytes:
        left = nbytes - len(received)
        if isinstance(sock, ssl.SSLSocket):
            part = await tls_retried(sock, functools.partial(sock.recv, left))
        else:
            part = await asyncio.get_running_loop().sock_recv(sock, left)
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        received += part
    return received


def receive_now(sock: socket.socket, most_nbytes: int) -> bytes:
    """Return what has arrived on a non-blocking socket. Raises BlockingIOError if nothing has, OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        return sock.recv(most_nbytes)
    try:
        received = sock.recv(most_nbytes)
        # The selector does not report bytes that are decrypted already.
        while waiting := sock.pending():
            received += sock.recv(waiting)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
        raise BlockingIOError from error
    return received


def send_now(sock: socket.socket, message: bytes | bytearray) -> int:
    """Send what fits the socket's buffer; return its bytes. Raises BlockingIOError if it is full, OSError."""
    try:
        return sock.send(message)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
        raise BlockingIOError from error


async def tls_retried(sock: ssl.SSLSocket, call: Callable[[], T]) -> T:
    """Repeat ``call`` whenever the non-blocking socket is ready, until OpenSSL needs no more of it."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            watch, forget = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            watch, forget = loop.add_writer, loop.remove_writer
        ready = asyncio.Event()
        watch(sock.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            forget(sock.fileno())
