"""The server's end of direct calls. What it demands of callers, checks and answers is as over gRPC."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc
import grpc.aio

from moonpool.runtime.rpc.frames import (
    DIRECT_PEER,
    WINDOW,
    Frame,
    FrameError,
    FrameSocket,
    Metadata,
    other_user,
    socket_name,
    unpack_call,
    unpack_count,
)

log = logging.getLogger(__name__)

# Of all callers. A caller has one connection to a server.
_MAX_CONNECTIONS = 1024
# Of one connection. Then it is not read until some have been answered; further streams are refused.
_MAX_CALLS = _MAX_STREAMS = 4096
_MAX_BACKLOG_NBYTES = 128 << 20
_ACCEPTS_A_TURN = 16

Answer = Callable[[Any, str, Metadata, Any], Awaitable[Any]]
"""Runs a handler of a method for a call with this metadata, in this context, which has its message. Returns
the reply; a method that streams writes to the context instead."""


class Handlers:
    """Collects the handlers of services, as ``add_XServicer_to_server`` gives them to a server."""

    def __init__(self) -> None:
        self.by_method: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.by_method |= {f"/{service}/{name}": each for name, each in handlers.items()}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same ones in another form."""


class DirectServer:
    """Takes calls of methods without streams of requests from processes of this user on this host. One event
    loop."""

    def __init__(self, address: str, handlers: Handlers, answer: Answer) -> None:
        """``address``: ``host:port`` of the gRPC server. Raises OSError: the name is in use."""
        self._handlers = handlers.by_method
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._connections: set[_Connection] = set()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.setblocking(False)
            self._sock.bind(socket_name(address))
            self._sock.listen(512)
        except BaseException:
            self._sock.close()
            raise
        self._loop.add_reader(self._sock, self._accept)

    @property
    def backlog_nbytes(self) -> int:
        """Bytes that callers have not taken yet, of those with calls that go on."""
        return sum(one.backlog_nbytes for one in self._connections if one.calls)

    async def stop(self, grace: float | None) -> None:
        """Take no more calls; cut off those that have not ended after ``grace`` seconds, and
        answers that callers have not taken by then."""
        ends_s = self._loop.time() + (grace or 0.0)
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for connection in self._connections:
            connection.stopping = True
        tasks = [task for connection in self._connections for task in connection.calls.values()]
        if tasks and grace:
            await asyncio.wait(tasks, timeout=grace)
        # Polled: an event would burden every frame for the sake of the last ones.
        while any(one.backlog_nbytes for one in self._connections) and self._loop.time() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.close()
        if tasks:
            await asyncio.wait(tasks)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("a direct connection was not accepted: %s", error)
                return
            if other_user(sock) or len(self._connections) >= _MAX_CONNECTIONS:
                sock.close()
                continue
            self._connections.add(_Connection(sock, self._handlers, self._answer, self._connections.discard))


class _Connection:
    def __init__(
        self,
        sock: socket.socket,
        handlers: Mapping[str, Any],
        answer: Answer,
        on_closed: Callable[[_Connection], None],
    ) -> None:
        self.calls: dict[int, asyncio.Task[None]] = {}
        self.stopping = False  # new calls are refused
        self._streams: dict[int, _StreamContext] = {}  # by number, too
        self._handlers = handlers
        self._answer = answer
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._frames = FrameSocket(sock, self._received, self._lost)

    @property
    def backlog_nbytes(self) -> int:
        """Bytes of answers that the caller has not taken yet."""
        return self._frames.backlog_nbytes

    def close(self) -> None:
        self._frames.close()
        self._lost("closed")

    def _lost(self, reason: str) -> None:
        """The caller is gone: as over gRPC its calls end."""
        self._on_closed(self)
        for task in self.calls.values():
            task.cancel()

    def _received(self, kind: int, number: int, body: bytes) -> None:
        if kind == Frame.CANCEL:
            if (task := self.calls.get(number)) is not None:
                task.cancel()
            return
        if kind == Frame.MORE:
            if (stream := self._streams.get(number)) is not None:
                stream.more(unpack_count(body))
            return
        if kind != Frame.CALL or number in self.calls:
            raise FrameError(f"it sent a frame of kind {kind} with number {number}")
        if self.stopping:
            self._fail(number, grpc.StatusCode.UNAVAILABLE, "it stops and takes no more calls", ())
            return
        method, metadata, message = unpack_call(body)
        task = self.calls[number] = self._loop.create_task(self._serve(number, method, metadata, message))
        # A task that is cancelled before it begins runs no ``finally``.
        task.add_done_callback(partial(self._ended, number))
        # Streams may be open for ever, and end by frames that must be read.
        num_calls = len(self.calls) - len(self._streams)
        if num_calls >= _MAX_CALLS or self._frames.backlog_nbytes > _MAX_BACKLOG_NBYTES:
            self._frames.pause()

    async def _serve(self, number: int, method: str, metadata: Metadata, message: bytes) -> None:
        handler = self._handlers.get(method)
        context: _Context
        if handler is not None and handler.unary_unary is not None:
            context = _Context(message, handler.request_deserializer)
        elif handler is not None and handler.unary_stream is not None:
            if len(self._streams) >= _MAX_STREAMS:
                self._fail(number, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams are open", ())
                return
            context = self._streams[number] = self._stream_context(number, message, handler)
        else:
            self._fail(number, grpc.StatusCode.UNIMPLEMENTED, f"there is no method {method}", ())
            return
        try:
            reply = await self._answer(handler, method, metadata, context)
        except grpc.aio.AbortError:
            self._fail(number, *context.aborted)
            return
        if number in self._streams:
            self._frames.send(Frame.END, number, b"")
        else:
            self._frames.send(Frame.REPLY, number, handler.response_serializer(reply))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self.calls[number]
        self._streams.pop(number, None)
        self._frames.resume()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a direct call failed", exc_info=error)
            self._fail(number, grpc.StatusCode.INTERNAL, f"its answer failed: {type(error).__name__}", ())

    def _stream_context(self, number: int, message: bytes, handler: Any) -> _StreamContext:
        def send(reply: Any) -> None:
            self._frames.send(Frame.MESSAGE, number, handler.response_serializer(reply))

        return _StreamContext(message, handler.request_deserializer, send)

    def _fail(self, number: int, status: grpc.StatusCode, details: str, about: Metadata) -> None:
        said = {"status": status.name, "details": details, "about": [list(pair) for pair in about]}
        self._frames.send(Frame.ERROR, number, json.dumps(said).encode())


class _Context:
    """What methods and the boundary use of ``grpc.aio.ServicerContext``."""

    def __init__(self, message: bytes, decode: Callable[[bytes], Any]) -> None:
        self.aborted: tuple[grpc.StatusCode, str, Metadata] = (grpc.StatusCode.UNKNOWN, "", ())
        self._message = message
        self._decode = decode

    async def read(self) -> Any:
        return self._decode(self._message)

    def peer(self) -> str:
        return DIRECT_PEER

    def auth_context(self) -> Mapping[str, Any]:
        return {}

    def set_code(self, status: grpc.StatusCode) -> None:
        """Methods that are not implemented call it and raise."""

    def set_details(self, details: str) -> None:
        """As ``set_code``."""

    async def abort(self, status: grpc.StatusCode, details: str = "", about: Metadata = ()) -> None:
        self.aborted = (status, details, about)
        raise grpc.aio.AbortError


class _StreamContext(_Context):
    """That of a method that streams."""

    def __init__(self, message: bytes, decode: Callable[[bytes], Any], send: Callable[[Any], None]) -> None:
        super().__init__(message, decode)
        self._send = send
        self._room = WINDOW  # messages that the caller has room for
        self._news = asyncio.Event()

    async def write(self, reply: Any) -> None:
        """Send a message once the caller has room for it."""
        while not self._room:
            self._news.clear()
            await self._news.wait()
        self._room -= 1
        self._send(reply)

    def more(self, count: int) -> None:
        """The caller has taken ``count`` messages."""
        self._room = min(self._room + count, WINDOW)
        self._news.set()
