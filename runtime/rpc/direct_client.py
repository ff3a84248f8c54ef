"""Calls to a server of this host without gRPC: one frame there, and one back for each message."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from moonpool.runtime.rpc.frames import (
    WINDOW,
    Frame,
    FrameError,
    FrameSocket,
    Metadata,
    other_user,
    pack_call,
    pack_count,
    socket_name,
)

_NUMBERS = 1 << 32
_ANSWERS = (Frame.REPLY, Frame.ERROR, Frame.MESSAGE, Frame.END)
_NO_METADATA = grpc.aio.Metadata()


class DirectConnection:
    """The connection to one server. It connects with the first call, and again after a loss."""

    def __init__(self, address: str) -> None:
        """``address``: ``host:port`` of its gRPC server."""
        self._address = address
        self._frames: FrameSocket | None = None
        self._calls: dict[int, DirectCall | DirectStream] = {}
        self._number = 0

    def begin(
        self,
        kind: type[DirectCall] | type[DirectStream],
        method: str,
        message: bytes,
        decode: Callable[[bytes], Any],
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> DirectCall | DirectStream | None:
        """Begin a call. ``kind``: whether the method streams. None: nothing of this user takes direct calls
        there; nothing was sent."""
        frames = self._frames if self._frames is not None and self._frames.open else self._connect()
        if frames is None:
            return None
        self._number = number = (self._number + 1) % _NUMBERS
        call = self._calls[number] = kind(self, number, decode, timeout)
        frames.send(Frame.CALL, number, pack_call(method, metadata, message))
        return call

    def taken(self, number: int, count: int) -> None:
        """The caller of a stream has taken ``count`` more messages."""
        if self._frames is not None:
            self._frames.send(Frame.MORE, number, pack_count(count))

    def cancel(self, number: int) -> None:
        """The caller does not wait any more."""
        if self._calls.pop(number, None) is not None and self._frames is not None:
            self._frames.send(Frame.CANCEL, number, b"")

    def close(self) -> None:
        """End all calls as if the connection were lost. Idempotent."""
        if self._frames is not None:
            self._frames.close()
            self._lost("the connection was closed here")

    def _connect(self) -> FrameSocket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            # At once: it succeeds, or there is no such name, or its queue is full.
            sock.connect(socket_name(self._address))
            # Its listener would refuse us, or is not ours to trust.
            if other_user(sock):
                raise PermissionError
        except OSError:
            sock.close()
            return None
        self._frames = FrameSocket(sock, self._received, self._lost)
        return self._frames

    def _received(self, kind: int, number: int, body: bytes) -> None:
        if kind not in _ANSWERS:
            raise FrameError(f"it sent a frame of kind {kind}")
        call = self._calls.get(number)
        if call is None:
            return  # it was cancelled
        if kind == Frame.MESSAGE and isinstance(call, DirectStream):
            call.message(body)
            return
        del self._calls[number]
        if kind == Frame.REPLY and isinstance(call, DirectCall):
            call.reply(body)
        elif kind == Frame.END and isinstance(call, DirectStream):
            call.end()
        elif kind == Frame.ERROR:
            _fail(call, body)
        else:
            call.fail(grpc.StatusCode.INTERNAL, f"it was answered with a frame of kind {kind}")
            raise FrameError(f"it sent a frame of kind {kind}")

    def _lost(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(grpc.StatusCode.UNAVAILABLE, reason)


def _fail(call: DirectCall | DirectStream, body: bytes) -> None:
    """``body``: of an ERROR."""
    try:
        said = json.loads(body)
        about = grpc.aio.Metadata(*((str(name), str(value)) for name, value in said["about"]))
        call.fail(grpc.StatusCode[said["status"]], str(said["details"]), about)
    except (ValueError, KeyError, TypeError) as error:
        call.fail(grpc.StatusCode.INTERNAL, f"its error cannot be read: {error}")


def _error(status: grpc.StatusCode, details: str, about: grpc.aio.Metadata | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status, _NO_METADATA, about or _NO_METADATA, details, None)


class DirectCall:
    """A call in progress: await it. It raises ``grpc.aio.AioRpcError`` as a call over gRPC does."""

    def __init__(
        self, connection: DirectConnection, number: int, decode: Callable[[bytes], Any], timeout: float | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._connection = connection
        self._number = number
        self._decode = decode
        self._answer: asyncio.Future[Any] = loop.create_future()
        self._deadline = None if timeout is None else loop.call_later(timeout, self._late)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self._answer.__await__())
        except asyncio.CancelledError:
            self._connection.cancel(self._number)
            raise
        finally:
            if self._deadline is not None:
                self._deadline.cancel()

    def reply(self, body: bytes) -> None:
        try:
            message = self._decode(body)
        except DecodeError as error:
            self.fail(grpc.StatusCode.INTERNAL, f"its reply cannot be read: {error}")
            return
        if not self._answer.done():
            self._answer.set_result(message)

    def fail(self, status: grpc.StatusCode, details: str, about: grpc.aio.Metadata | None = None) -> None:
        if not self._answer.done():
            self._answer.set_exception(_error(status, details, about))
            # Its caller may have given up: that is no error to be logged.
            self._answer.exception()

    def _late(self) -> None:
        self._connection.cancel(self._number)
        self.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class DirectStream:
    """A stream in progress: iterate over it. It raises ``grpc.aio.AioRpcError`` as one over gRPC does.

    Messages that came before an error are yielded before it is raised. Cancel it, unless it has ended.
    """

    def __init__(
        self, connection: DirectConnection, number: int, decode: Callable[[bytes], Any], timeout: float | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._connection = connection
        self._number = number
        self._decode = decode
        self._messages: deque[bytes] = deque()
        self._num_taken = 0  # since the other side was told
        self._news = asyncio.Event()
        self._code: asyncio.Future[grpc.StatusCode] = loop.create_future()
        self._error: BaseException = StopAsyncIteration()  # what it ends with
        self._deadline = None if timeout is None else loop.call_later(timeout, self._late)

    def __aiter__(self) -> DirectStream:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._code.done():
                raise self._error
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        body = self._messages.popleft()
        self._num_taken += 1
        if self._num_taken >= WINDOW // 2:
            self._connection.taken(self._number, self._num_taken)
            self._num_taken = 0
        try:
            return self._decode(body)
        except DecodeError as error:
            self.cancel()
            raise _error(grpc.StatusCode.INTERNAL, f"its message cannot be read: {error}", None) from None

    async def code(self) -> grpc.StatusCode:
        """Wait for its end."""
        return await asyncio.shield(self._code)

    def cancel(self) -> bool:
        """The caller wants no more of it. False: it has ended before."""
        if self._code.done():
            return False
        self._connection.cancel(self._number)
        self._messages.clear()
        self._end(grpc.StatusCode.CANCELLED, asyncio.CancelledError())
        return True

    def message(self, body: bytes) -> None:
        self._messages.append(body)
        self._news.set()

    def end(self) -> None:
        self._end(grpc.StatusCode.OK, StopAsyncIteration())

    def fail(self, status: grpc.StatusCode, details: str, about: grpc.aio.Metadata | None = None) -> None:
        self._end(status, _error(status, details, about))

    def _end(self, status: grpc.StatusCode, error: BaseException) -> None:
        if not self._code.done():
            self._error = error
            self._code.set_result(status)
            self._news.set()
            if self._deadline is not None:
                self._deadline.cancel()

    def _late(self) -> None:
        self._connection.cancel(self._number)
        self.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
