"""The limit of TCP: plain blocking sockets between two processes, with nothing but the bytes."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_REQUEST = struct.Struct("<QQB")
READ, WRITE = 0, 1
# (connections, bytes a call): ``tuned`` picks the fastest.
SETTINGS = ((1, 512 << 10), (2, 512 << 10), (2, 4 << 20), (4, 1 << 20))


def serve_raw(listening: socket.socket, memory: memoryview) -> None:
    """Answer requests (bytes, bytes a call, direction) on every connection, forever."""
    while True:
        sock, _ = listening.accept()
        threading.Thread(target=_serve, args=(sock, memory), daemon=True).start()


def _serve(sock: socket.socket, memory: memoryview) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := sock.recv(_REQUEST.size, socket.MSG_WAITALL):
        nbytes, step, direction = _REQUEST.unpack(request)
        if direction == READ:
            _send(sock, memory, nbytes, step)
        else:
            _receive(sock, memory, nbytes, step)
            sock.sendall(b"\0")


def _send(sock: socket.socket, memory: memoryview, nbytes: int, step: int) -> None:
    at = 0
    while at < nbytes:
        at += sock.send(memory[at : min(at + step, nbytes)])


def _receive(sock: socket.socket, memory: memoryview, nbytes: int, step: int) -> None:
    at = 0
    while at < nbytes:
        at += sock.recv_into(memory[at : min(at + step, nbytes)], 0, socket.MSG_WAITALL)


class RawStream:
    """The client. Blocking; each connection has a thread."""

    def __init__(self, port: int, memory: memoryview, streams: int, step: int) -> None:
        self._memory = memory
        self._step = step
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = ThreadPoolExecutor(streams)

    def move(self, nbytes: int, direction: str) -> float:
        """Seconds for ``nbytes`` over all connections together."""
        step = -(-nbytes // len(self._sockets))
        parts = [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
        started = time.perf_counter()
        one: Callable[[socket.socket, tuple[int, int]], None] = (
            self._read if direction == "read" else self._write
        )
        if len(parts) == 1:
            one(self._sockets[0], parts[0])
        else:
            list(self._threads.map(one, self._sockets, parts))
        return time.perf_counter() - started

    def _read(self, sock: socket.socket, part: tuple[int, int]) -> None:
        at, nbytes = part
        sock.sendall(_REQUEST.pack(nbytes, self._step, READ))
        _receive(sock, self._memory[at : at + nbytes], nbytes, self._step)

    def _write(self, sock: socket.socket, part: tuple[int, int]) -> None:
        at, nbytes = part
        sock.sendall(_REQUEST.pack(nbytes, self._step, WRITE))
        _send(sock, self._memory[at : at + nbytes], nbytes, self._step)
        sock.recv(1)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._threads.shutdown()


def tuned(port: int, memory: memoryview) -> RawStream:
    """A stream with the fastest of ``SETTINGS``, measured here."""
    nbytes = min(len(memory), 64 << 20)
    best, best_s = SETTINGS[0], float("inf")
    for setting in SETTINGS:
        stream = RawStream(port, memory, *setting)
        seconds = sorted(stream.move(nbytes, "read") for _ in range(5))[2]
        stream.close()
        if seconds < best_s:
            best, best_s = setting, seconds
    return RawStream(port, memory, *best)
