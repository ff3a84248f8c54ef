"""gRPC servers: authenticate callers, check messages, map errors to statuses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from prometheus_client import Counter

from moonpool.runtime.cancellation import outlast
from moonpool.runtime.errors import ConfigError, MoonpoolError, PortInUse, failure_of
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.message_checks import check_message
from moonpool.runtime.network.sockets import check_free, host_port, no_listener
from moonpool.runtime.observing import audit, tracing
from moonpool.runtime.observing.log import request_id
from moonpool.runtime.redaction import redacted
from moonpool.runtime.rpc.bounds import (
    ERROR_KIND,
    FAILURE_CLASS,
    REQUEST_ID,
    SERVER_OPTIONS,
    metadata_value,
    short_name,
)
from moonpool.runtime.rpc.direct_server import DirectServer, Handlers
from moonpool.runtime.rpc.frames import Metadata
from moonpool.runtime.security import process
from moonpool.runtime.security.posture import check_listening
from moonpool.runtime.security.roles import Caller, NotPermitted, Unauthenticated, is_administrative

log = logging.getLogger(__name__)

_REFUSED = Counter("moonpool_rpc_refused", "Calls refused at the boundary, by reason.", ["reason"])

Servicer = tuple[Callable[[Any, Any], None], object]


class Server:
    """A running server."""

    def __init__(self, over_grpc: grpc.aio.Server, direct: DirectServer | None) -> None:
        self._grpc = over_grpc
        self._direct = direct

    @property
    def backlog_nbytes(self) -> int:
        """Bytes that callers on this host have not taken yet, of those with calls that go on."""
        return 0 if self._direct is None else self._direct.backlog_nbytes

    async def stop(self, grace: float | None) -> None:
        """Take no more calls; cancel those that have not ended after ``grace`` seconds. Idempotent."""
        direct, self._direct = self._direct, None
        stopping = self._grpc.stop(grace)
        await (stopping if direct is None else asyncio.gather(stopping, direct.stop(grace)))


async def serve(
    servicers: Sequence[Servicer],
    host: str,
    port: int,
    *,
    security: process.Security | None = None,
    direct: bool = False,
) -> tuple[Server, int]:
    """Start a server for pairs of ``(add_XServicer_to_server, servicer)``; return it and its port (0: any).

    ``security``: what it demands of callers; by default what this process demands. ``direct``: also take
    calls over a Unix socket, see ``channel``.
    A request with a number out of its range is refused before a method sees it. A ``MoonpoolError`` raised
    by a method becomes its ``code``, with its text as details and its class of failure; any other exception
    is logged and becomes INTERNAL.

    Raises:
        PortInUse: another process listens there.
        ConfigError: ``host`` is no address of this machine, or other machines reach it and no caller would be
            authenticated.
    """
    security = security or process.current()
    check_listening(security, host, "node.host")
    boundary = _Boundary(security)
    server = grpc.aio.server(interceptors=[boundary], options=SERVER_OPTIONS)
    for add, servicer in servicers:
        add(servicer, server)
    try:
        bound_port = bind(server, security, host, port, "node.host", "node.port")
        # A start that is cut off cannot be stopped.
        await outlast(asyncio.ensure_future(server.start()))
    except (PortInUse, ConfigError, asyncio.CancelledError):
        # One that is collected without it waits for ever.
        await server.stop(None)
        raise
    # Where certificates are demanded: a Unix socket shows none.
    direct = direct and security.tls is None
    beside = _direct(servicers, host_port(host, bound_port), boundary) if direct else None
    return Server(server, beside), bound_port


def bind(
    server: grpc.Server | grpc.aio.Server,
    security: process.Security,
    host: str,
    port: int,
    host_option: str,
    port_option: str,
) -> int:
    """Let a server listen there; return its port (0: any). Raises PortInUse or ConfigError, naming the
    options."""
    try:
        if (tls := security.tls) is None:
            return int(server.add_insecure_port(host_port(host, port)))
        return int(server.add_secure_port(host_port(host, port), security.server_credentials(tls)))
    except RuntimeError as error:
        # gRPC does not say why.
        try:
            check_free(host, port)
        except OSError as reason:
            raise no_listener(reason, host, port, host_option, port_option) from error
        raise PortInUse(host, port, port_option) from error  # it was in use then


def _direct(servicers: Sequence[Servicer], address: str, boundary: _Boundary) -> DirectServer | None:
    handlers = Handlers()
    for add, servicer in servicers:
        add(servicer, handlers)
    try:
        return DirectServer(address, handlers, boundary.answer)
    except OSError as error:
        log.warning("direct calls are not served, gRPC is: %s", error)
        return None


class _Boundary(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Admits callers, restores the request id and maps errors for every method of a server."""

    def __init__(self, security: process.Security) -> None:
        self._security = security

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None  # no such method: gRPC answers UNIMPLEMENTED
        serve = self._served(handler, details.method, details.invocation_metadata)
        # As if the caller sent a stream: gRPC receives no message then before ``_first`` reads it, and those
        # of callers that are refused never.
        streams = handler.unary_unary is None
        form = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        return form(serve, handler.request_deserializer, handler.response_serializer)

    async def answer(self, handler: Any, method: str, metadata: Metadata, context: Any) -> Any:
        """The reply to a direct call; None after a stream, which is written to ``context``.

        ``AbortError``: ``context.abort`` was called."""
        return await self._served(handler, method, metadata)(None, context)

    def _served(self, handler: Any, method: str, metadata: Any) -> Callable[[Any, Any], Awaitable[Any]]:
        """A function that admits the caller and runs the method, for one call with this metadata."""
        unary, stream = handler.unary_unary, handler.unary_stream
        if unary is None and stream is None:
            raise NotImplementedError(f"{method}: client streams are not used in Moonpool")
        about, parent = metadata_value(metadata, REQUEST_ID), metadata_value(metadata, tracing.TRACEPARENT)
        name, token = short_name(method), metadata_value(metadata, process.TOKEN)

        async def call(_: Any, context: Any) -> Any:
            request_id.set(about)
            try:
                with tracing.server_span(name, parent), _logged(method, about):
                    process.caller.set(self._security.admit(name, token, context.auth_context))
                    request = await _first(context)
                    if unary is not None:
                        reply = await unary(request, context)
                        _audited(context, method, "ok")
                        return reply
                    async for response in stream(request, context):
                        await context.write(response)
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError as cancelled:
                error = cancelled.args[0] if cancelled.args else None
                if not isinstance(error, MoonpoolError):
                    raise  # by the caller, or at the server's end
                await _abort(context, error, method)
            except Exception as error:
                await _abort(context, error, method)

        return call


class MessageMalformed(MoonpoolError):
    """A call had no message, or one of another type. It had no effect."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST


def end_stream(serving: asyncio.Task[Any], error: MoonpoolError) -> None:
    """End a stream with ``error``, also where its caller does not read. ``serving``: the method's task."""
    serving.cancel(error)


async def _first(context: Any) -> Any:
    """The message of the call, checked."""
    try:
        request = await context.read()
    except DecodeError as error:
        raise MessageMalformed(f"the call's message cannot be read: {error}") from None
    if request is grpc.aio.EOF:  # type: ignore[attr-defined]
        raise MessageMalformed("the call has no message")
    check_message(request)
    return request


@contextmanager
def _logged(method: str, about: str) -> Iterator[None]:
    """Log the duration of a request's call at level debug."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        if about:
            log.debug("%s took %.4f s", short_name(method), time.monotonic() - began_s)


def _audited(context: Any, method: str, outcome: str) -> None:
    who = process.caller.get()
    if is_administrative(who, short_name(method)):
        audit.administrative(short_name(method), outcome, who=_name(who), origin=context.peer())


def _name(who: Caller | None) -> str:
    return f"{who.role} {who.name}" if who else ""


def count_refused(context: Any, method: str, error: Unauthenticated | NotPermitted) -> None:
    """Log, count and audit a call that is not admitted. ``method``: as gRPC names it, or short."""
    kind, what = type(error).__name__, short_name(method)
    _REFUSED.labels(kind).inc()
    log.warning("%s refused a call of %s: %s", what, context.peer(), error)
    who = _name(error.who if isinstance(error, NotPermitted) else None)
    audit.refused(what, str(error), who=who, origin=context.peer(), kind=f"{kind} {what}")


async def _abort(context: Any, error: Exception, method: str) -> None:
    if isinstance(error, Unauthenticated | NotPermitted):
        count_refused(context, method, error)
    else:
        _audited(context, method, type(error).__name__)
    if isinstance(error, MoonpoolError):
        code, sentence = grpc.StatusCode[error.code], str(error)
    else:
        log.exception("%s failed", method)
        code, sentence = grpc.StatusCode.INTERNAL, redacted(f"{type(error).__name__}: {error}")
    about = ((ERROR_KIND, type(error).__name__), (FAILURE_CLASS, failure_of(error).value))
    await context.abort(code, sentence, about)
