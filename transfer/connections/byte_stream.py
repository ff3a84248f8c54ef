"""Blocking scatter and gather over one connected socket, with or without TLS."""

from __future__ import annotations

import contextlib
import ctypes
import math
import socket
import ssl
import struct
import time
from collections.abc import Callable

import numpy as np

from moonpool.transfer.connections.wire import PAGE_NBYTES
from moonpool.transfer.memory.chunks import split_runs, vectors, windows
from moonpool.transfer.native import libc
from moonpool.transfer.native.arrays import U64, address_of
from moonpool.transfer.native.compiled_copy import Reply, compiled_copy

_TIMEVAL = struct.Struct("ll")
# From this size on aligned bytes gain more than padding costs.
_ALIGNED_NBYTES = 256 << 10
_LINGER_RESET = struct.pack("ii", 1, 0)
# Of struct tcp_info: tcpi_last_data_sent and tcpi_last_data_recv, in milliseconds; tcpi_rtt, in microseconds;
# tcpi_bytes_acked and tcpi_bytes_received.
_SENT_AND_RECEIVED_AGO = struct.Struct("44xI4xI")
_ROUND_TRIP = struct.Struct("68xI")
_ACKED_AND_RECEIVED = struct.Struct("120xQQ")


class ByteStream:
    """One end of a data connection, used by one thread; ``shut`` may be called from any.

    Each system call moves up to ``slice_nbytes`` without the GIL. Few calls are made, because winning the GIL
    back from busy threads takes up to a switch interval.
    All methods raise OSError: ConnectionResetError when the stream ends early, TimeoutError by ``limit``.
    """

    def __init__(self, sock: socket.socket, slice_nbytes: int) -> None:
        sock.setblocking(True)
        self.sock = sock
        self._fd = sock.fileno()
        self._slice_nbytes = slice_nbytes
        self._deadline = math.inf
        self._sent_nbytes = 0

    def limit(self, seconds: float) -> None:
        """Set the time limit of the following calls; 0: none."""
        self._deadline = time.monotonic() + seconds if seconds else math.inf
        whole = int(seconds)
        value = _TIMEVAL.pack(whole, max(int((seconds - whole) * 1e6), 0 if seconds == 0 else 1))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def padding(self, head_nbytes: int, nbytes: int) -> int:
        """Bytes to send between a head and its ``nbytes``, which then begin at a page of the stream.

        The kernel keeps sent bytes in pages. It copies bytes with our alignment 5 % faster, on either side.
        """
        return -(self._sent_nbytes + head_nbytes) % PAGE_NBYTES if nbytes >= _ALIGNED_NBYTES else 0

    def send(self, head: bytes, address: U64 | None = None, nbytes: U64 | None = None) -> None:
        """Send ``head``, then runs of memory: ``nbytes[i]`` at ``address[i]``."""
        if address is None:
            # It nearly always fits the socket's buffer.
            sent = self.sock.send(head)
            self._sent_nbytes += sent
            head = head[sent:]
            if not head:
                return
        first = np.frombuffer(head, np.uint8)
        table = vectors(np.array([address_of(first)], np.uint64), np.array([len(head)], np.uint64))
        if address is not None and nbytes is not None:
            table = np.concatenate((table, self._table(address, nbytes)))
        self._sent_nbytes += self._each(table, self._send_vectors, socket.MSG_NOSIGNAL)

    def ask_now(self, request: bytes, reply: Reply, wait_s: float) -> bytes | None:
        """``CompiledCopy.ask_now``. None: also without a compiler, and with TLS."""
        compiled = compiled_copy()
        came = None if compiled is None else compiled.ask_now(self._fd, request, reply, wait_s)
        self._sent_nbytes += 0 if came is None else len(request)
        return came

    def note_sent(self, nbytes: int) -> None:
        """Native code has sent ``nbytes`` here."""
        self._sent_nbytes += nbytes

    def receive_into(self, address: U64, nbytes: U64, wanted: Callable[[], bool] = lambda: True) -> None:
        """Receive into runs of memory. Raises OSError also when not ``wanted()`` any more."""
        self._each(self._table(address, nbytes), self._receive_vectors, socket.MSG_WAITALL, wanted)

    def receive(self, nbytes: int) -> bytes:
        received = b""
        while len(received) < nbytes:
            part = self._receive_part(nbytes - len(received))
            if not part:
                raise ConnectionResetError("the other side closed the connection")
            received += part
        return received

    def discard(self, nbytes: int) -> None:
        """Receive and drop ``nbytes``."""
        scratch = bytearray(min(nbytes, 1 << 18))
        while nbytes:
            received = self.sock.recv_into(scratch, min(nbytes, len(scratch)))
            if not received:
                raise ConnectionResetError("the other side closed the connection")
            nbytes -= received

    @property
    def moved_nbytes(self) -> int:
        """Bytes that a TCP connection has received and had acknowledged. 0 once it is closed."""
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AND_RECEIVED.size)
        except OSError:
            return 0
        return sum(_ACKED_AND_RECEIVED.unpack(info))

    @property
    def round_trip_s(self) -> float:
        """Of a TCP connection, as the kernel has measured it; 0 on a Unix socket."""
        if self.sock.family == socket.AF_UNIX:
            return 0.0
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
        return float(_ROUND_TRIP.unpack(info)[0]) / 1e6

    @property
    def idle_s(self) -> float:
        """Seconds since a TCP connection has carried data. 0 on a Unix socket, and once it is closed."""
        if self.sock.family == socket.AF_UNIX:
            return 0.0
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT_AND_RECEIVED_AGO.size)
        except OSError:
            return 0.0
        return float(min(_SENT_AND_RECEIVED_AGO.unpack(info))) / 1e3

    def shut(self) -> None:
        """Make a blocked call fail. Idempotent."""
        # Fails if the socket is closed or no longer connected.
        with contextlib.suppress(OSError):
            self._shutdown()

    def _shutdown(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)

    def _receive_part(self, most_nbytes: int) -> bytes:
        return self.sock.recv(most_nbytes, socket.MSG_WAITALL)

    def _send_vectors(self, fd: int, table: int, count: int, flags: int) -> int:
        return libc.send_vectors(fd, table, count, flags)

    def _receive_vectors(self, fd: int, table: int, count: int, flags: int) -> int:
        return libc.receive_vectors(fd, table, count, flags)

    def close(self, *, reset: bool = False) -> None:
        """reset: drop bytes that the other side has not received."""
        if reset and self.sock.fileno() >= 0:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.sock.close()

    def _table(self, address: U64, nbytes: U64) -> U64:
        if len(nbytes) and nbytes.max() > self._slice_nbytes:
            run, skipped, nbytes = split_runs(nbytes, self._slice_nbytes)
            address = address[run] + skipped
        return vectors(address, nbytes)

    def _each(
        self,
        table: U64,
        call: Callable[[int, int, int, int], int],
        flags: int,
        wanted: Callable[[], bool] = lambda: True,
    ) -> int:
        """Move all rows. Returns their bytes."""
        whole = 0
        base = address_of(table)
        for begin, end, left in windows(table[:, 1], libc.IOV_MAX, self._slice_nbytes):
            whole += left
            while True:
                if time.monotonic() > self._deadline:
                    raise TimeoutError("the time limit of the request has passed")
                if not wanted():
                    raise ConnectionAbortedError("these bytes are no longer wanted")
                moved = call(self._fd, base + 16 * begin, end - begin, flags)
                if moved == left:
                    break
                if not moved:
                    raise ConnectionResetError("the other side closed the connection")
                left -= moved
                begin = _advance(table, begin, end, moved)
        return whole


def _advance(table: U64, begin: int, end: int, moved: int) -> int:
    """Drop ``moved`` bytes from the front of rows begin … end. Returns the first row with bytes left."""
    ends = np.cumsum(table[begin:end, 1])
    row = int(np.searchsorted(ends, np.uint64(moved), side="right"))
    taken = np.uint64(moved) - (ends[row - 1] if row else np.uint64(0))
    table[begin + row, 0] += taken
    table[begin + row, 1] -= taken
    return begin + row


class TlsByteStream(ByteStream):
    """Through OpenSSL: each record of 16 KiB acquires the GIL."""

    sock: ssl.SSLSocket

    def limit(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds if seconds else math.inf
        self.sock.settimeout(seconds or None)

    def _receive_part(self, most_nbytes: int) -> bytes:
        return self.sock.recv(most_nbytes)

    def _send_vectors(self, fd: int, table: int, count: int, flags: int) -> int:
        return self._each_vector(table, count, self.sock.send)

    def _receive_vectors(self, fd: int, table: int, count: int, flags: int) -> int:
        return self._each_vector(table, count, self.sock.recv_into)

    def ask_now(self, request: bytes, reply: Reply, wait_s: float) -> bytes | None:
        return None

    @staticmethod
    def _each_vector(table: int, count: int, move: Callable[[memoryview], int]) -> int:
        """Returns the moved bytes: fewer than the vectors have if the stream ends."""
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
        # SSLSocket.shutdown would leave TLS first.
        socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def byte_stream(sock: socket.socket, slice_nbytes: int) -> ByteStream:
    """The stream that fits ``sock``."""
    return (TlsByteStream if isinstance(sock, ssl.SSLSocket) else ByteStream)(sock, slice_nbytes)
