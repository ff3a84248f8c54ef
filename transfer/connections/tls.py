"""TLS on the TCP connections between agents: mutual, with the certificates of one authority."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from moonpool.runtime.config.options import TlsOptions
from moonpool.runtime.errors import ConfigError
from moonpool.transfer.connections.byte_stream import ByteStream

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """What our ends of connections need, as a client and as a server."""

    client: ssl.SSLContext
    server: ssl.SSLContext


def tls_contexts(options: TlsOptions) -> TlsContexts | None:
    """None: no TLS. Raises ConfigError when the files are missing or do not fit."""
    if not options.cert:
        return None
    try:
        return TlsContexts(_context(options, client=True), _context(options, client=False))
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"transfer.tls: cannot use {options.cert}, {options.key}, {options.ca}: {error}", "transfer.tls"
        ) from error


def _context(options: TlsOptions, *, client: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Nodes come and go with their addresses: what counts is who signed, and then the cluster's secret.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(options.ca)
    context.load_cert_chain(options.cert, options.key)
    return context


async def secure(sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> ssl.SSLSocket:
    """``sock``, connected and non-blocking, with TLS on it. It is taken over, and closed on any error.

    Raises OSError when the other side has no certificate of the same authority, or speaks no TLS.
    """
    secured = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    try:
        await _retried(secured, secured.do_handshake)
    except ssl.SSLError as error:
        secured.close()
        raise ConnectionAbortedError(
            f"no TLS with it ({error}); transfer.tls must fit on all nodes"
        ) from error
    except BaseException:
        secured.close()
        raise
    return secured


async def send_all(sock: socket.socket, message: bytes) -> None:
    """On a non-blocking socket, with TLS or without. OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        await asyncio.get_running_loop().sock_sendall(sock, message)
        return
    left = message
    while left:
        left = left[await _retried(sock, functools.partial(sock.send, left)) :]


async def receive_some(sock: socket.socket, most_nbytes: int) -> bytes:
    """On a non-blocking socket, with TLS or without: empty at the stream's end. OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        return await asyncio.get_running_loop().sock_recv(sock, most_nbytes)
    return await _retried(sock, lambda: sock.recv(most_nbytes))


async def _retried(sock: ssl.SSLSocket, call: Callable[[], T]) -> T:
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


def receive_now(sock: socket.socket, most_nbytes: int) -> bytes:
    """What has arrived on a non-blocking socket. Raises BlockingIOError when nothing has, OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        return sock.recv(most_nbytes)
    try:
        received = sock.recv(most_nbytes)
        # Decrypted already: the selector would not tell of it.
        while waiting := sock.pending():
            received += sock.recv(waiting)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
        raise BlockingIOError from error
    return received


def send_now(sock: socket.socket, message: bytes | bytearray) -> int:
    """As many bytes as there is room for; BlockingIOError when there is none, OSError."""
    try:
        return sock.send(message)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
        raise BlockingIOError from error


class TlsByteStream(ByteStream):
    """Through OpenSSL instead of straight from the kernel: one record of 16 KiB a turn of the GIL."""

    sock: ssl.SSLSocket

    def limit(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds if seconds else float("inf")
        self.sock.settimeout(seconds or None)

    def receive(self, nbytes: int) -> bytes:
        received = b""
        while len(received) < nbytes:
            part = self.sock.recv(nbytes - len(received))
            if not part:
                raise ConnectionResetError("the other side closed the connection")
            received += part
        return received

    def _send_vectors(self, fd: int, table: int, count: int, flags: int) -> int:
        return self._each_vector(table, count, self.sock.send)

    def _receive_vectors(self, fd: int, table: int, count: int, flags: int) -> int:
        return self._each_vector(table, count, self.sock.recv_into)

    @staticmethod
    def _each_vector(table: int, count: int, move: Callable[[memoryview], int]) -> int:
        """Bytes moved; fewer than the vectors have where the stream ends."""
        vectors = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * count)).from_address(table)).reshape(-1, 2)
        total = 0
        for address, nbytes in vectors.tolist():
            view = memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
            while len(view):
                moved = move(view)
                if not moved:
                    return total
                total += moved
                view = view[moved:]
        return total

    def _shutdown(self) -> None:
        # Not SSLSocket's own, which goes back to plain text first.
        socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def byte_stream(sock: socket.socket, slice_nbytes: int) -> ByteStream:
    """The stream that fits ``sock``."""
    return (TlsByteStream if isinstance(sock, ssl.SSLSocket) else ByteStream)(sock, slice_nbytes)
