"""Calls to a server of this host without gRPC: one frame there, one back."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Generator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from moonpool.runtime.rpc.frames import (
    Frame,
    FrameError,
    FrameSocket,
    Metadata,
    other_user,
    pack_call,
    socket_name,
)

_NUMBERS = 1 << 32


class DirectConnection:
    """The connection to one server. It connects with the first call, and again after a loss."""

    def __init__(self, address: str) -> None:
        """``address``: ``host:port`` of its gRPC server."""
        self._address = address
        self._frames: FrameSocket | None = None
        self._calls: dict[int, DirectCall] = {}
        self._number = 0

    def call(
        self,
        method: str,
        message: bytes,
        decode: Callable[[bytes], Any],
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> DirectCall | None:
        """Begin a call. None: nothing of this user takes direct calls there; nothing was sent."""
        frames = self._frames if self._frames is not None and self._frames.open else self._connect()
        if frames is None:
            return None
        self._number = number = (self._number + 1) % _NUMBERS
        call = self._calls[number] = DirectCall(self, number, decode, timeout)
        frames.send(Frame.CALL, number, pack_call(method, metadata, message))
        return call

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
        if kind not in (Frame.REPLY, Frame.ERROR):
            raise FrameError(f"it sent a frame of kind {kind}")
        call = self._calls.pop(number, None)
        if call is None:
            return  # it was cancelled
        if kind == Frame.REPLY:
            call.reply(body)
            return
        try:
            said = json.loads(body)
            about = grpc.aio.Metadata(*((str(name), str(value)) for name, value in said["about"]))
            call.fail(grpc.StatusCode[said["status"]], str(said["details"]), about)
        except (ValueError, KeyError, TypeError) as error:
            call.fail(grpc.StatusCode.INTERNAL, f"its error cannot be read: {error}")

    def _lost(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(grpc.StatusCode.UNAVAILABLE, reason)


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
            none = grpc.aio.Metadata()
            self._answer.set_exception(grpc.aio.AioRpcError(status, none, about or none, details, None))
            # Its caller may have given up: that is no error to be logged.
            self._answer.exception()

    def _late(self) -> None:
        self._connection.cancel(self._number)
        self.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
