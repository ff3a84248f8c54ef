"""Frames of direct calls over a Unix socket: header, body; see ``direct_client`` and ``direct_server``.

A gRPC call in Python takes longer than all else that a small operation of a store does; a frame takes a
system call on either side.

CALL      lengths of method and metadata (u16 each), method, metadata, message
CANCEL    empty: the caller does not wait any more
REPLY     message
ERROR     JSON: status, details, trailing metadata
MESSAGE   one reply of a method that streams
END       empty: the stream had no more
MORE      number of messages (u32) that the caller has taken from a stream: it has room for as many more

The number in the header, drawn by the caller, tells the calls of a connection apart.
"""

from __future__ import annotations

import asyncio
import enum
import os
import socket
import struct
from collections.abc import Callable, Sequence

from moonpool.runtime.rpc.bounds import MAX_MESSAGE_NBYTES

_HEADER = struct.Struct("<IBI")
_CALL = struct.Struct("<HH")
_COUNT = struct.Struct("<I")
_MAX_BODY_NBYTES = MAX_MESSAGE_NBYTES + (16 << 10)
_RECEIVE_NBYTES = 256 << 10
# From this size on a copy to put the header before the body costs more than a second vector.
_JOINED_NBYTES = 16 << 10
WINDOW = 64
"""Messages of a stream that its caller has not taken; then the method waits."""

DIRECT_PEER = "unix:"
"""What ``context.peer()`` of a direct call is."""

Metadata = Sequence[tuple[str, str]]


class Frame(enum.IntEnum):
    CALL = 1
    CANCEL = 2
    REPLY = 3
    ERROR = 4
    MESSAGE = 5
    END = 6
    MORE = 7


class FrameError(Exception):
    """The other side violated the protocol. The connection is closed."""


def socket_name(address: str) -> str:
    """The abstract name at which the server of ``host:port`` takes direct calls. Such names are of a network
    namespace, as ports are."""
    return f"\0moonpool-rpc-{address}"


def other_user(sock: socket.socket) -> bool:
    """Whether a process of another user is at the other end."""
    _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid) != os.getuid()


def pack_call(method: str, metadata: Metadata, message: bytes) -> bytes:
    """The body of a CALL. Keys and values of metadata have no NUL."""
    name, about = method.encode(), "\0".join(text for pair in metadata for text in pair).encode()
    return _CALL.pack(len(name), len(about)) + name + about + message


def unpack_call(body: bytes) -> tuple[str, list[tuple[str, str]], bytes]:
    """Raises ``FrameError``."""
    try:
        name_nbytes, about_nbytes = _CALL.unpack_from(body)
        begin = _CALL.size + name_nbytes
        end = begin + about_nbytes
        name, texts = body[_CALL.size : begin].decode(), body[begin:end].decode().split("\0")
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(f"it sent a call that cannot be read: {error}") from None
    if end > len(body):
        raise FrameError("it sent a call that is cut off")
    return name, list(zip(texts[::2], texts[1::2], strict=False)), body[end:]


def pack_count(count: int) -> bytes:
    """The body of a MORE."""
    return _COUNT.pack(count)


def unpack_count(body: bytes) -> int:
    """Raises ``FrameError``."""
    if len(body) != _COUNT.size:
        raise FrameError(f"it sent a count of {len(body)} bytes")
    return int(_COUNT.unpack(body)[0])


class FrameSocket:
    """One end of a connection. Belongs to the event loop's thread."""

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[int, int, bytes], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """``sock``: connected; closed by ``close``. ``on_frame``: gets kind, number and body, and may raise
        ``FrameError``. ``on_lost``: called once, not after ``close``."""
        sock.setblocking(False)
        self._sock = sock
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._backlog = bytearray()
        self._paused = False
        self.open = True
        self._loop.add_reader(sock, self._readable)

    @property
    def backlog_nbytes(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._backlog)

    def send(self, kind: Frame, number: int, body: bytes) -> None:
        """Send now, or as soon as the other side reads. Does nothing on a connection that was lost."""
        if not self.open:
            return
        header = _HEADER.pack(len(body), kind, number)
        if self._backlog:
            self._backlog += header
            self._backlog += body
            return
        try:
            if len(body) < _JOINED_NBYTES:
                sent = self._sock.send(header + body)
            else:
                sent = self._sock.sendmsg((header, body))
        except BlockingIOError:
            sent = 0
        except OSError as error:
            # Its callers are told in their own turn.
            self._loop.call_soon(self._lose, str(error))
            return
        if sent < len(header) + len(body):
            self._backlog += (
                (header + body)[sent:] if sent < len(header) else memoryview(body)[sent - len(header) :]
            )
            self._loop.add_writer(self._sock, self._writable)

    def pause(self) -> None:
        """Stop reading until ``resume``."""
        if self.open and not self._paused:
            self._paused = True
            self._loop.remove_reader(self._sock)

    def resume(self) -> None:
        if self.open and self._paused:
            self._paused = False
            self._loop.add_reader(self._sock, self._readable)
            self._loop.call_soon(self._parse)

    def close(self) -> None:
        """Idempotent."""
        if self.open:
            self.open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _lose(self, reason: str) -> None:
        if self.open:
            self.close()
            self._on_lost(reason)

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._backlog)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        del self._backlog[:sent]
        if not self._backlog:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            received = self._sock.recv(_RECEIVE_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        if not received:
            self._lose("its process closed the connection")
            return
        self._received += received
        self._parse()

    def _parse(self) -> None:
        position = 0
        received = self._received
        while self.open and not self._paused and len(received) - position >= _HEADER.size:
            nbytes, kind, number = _HEADER.unpack_from(received, position)
            begin = position + _HEADER.size
            if nbytes > _MAX_BODY_NBYTES:
                self._lose(f"it sent a frame of {nbytes} bytes")
                return
            if len(received) < begin + nbytes:
                break
            position = begin + nbytes
            with memoryview(received) as view:
                body = bytes(view[begin:position])
            try:
                self._on_frame(kind, number, body)
            except FrameError as error:
                self._lose(str(error))
                return
        del received[:position]
