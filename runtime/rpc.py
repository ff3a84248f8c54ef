"""gRPC servers and channels: limits, keepalive, request ids, ranges of numbers, and the mapping of errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import grpc
import grpc.aio
from prometheus_client import Counter

from moonpool.runtime.errors import MoonpoolError, NodeUnavailable, PortInUse, RemoteError
from moonpool.runtime.number_checks import NumberOutOfRange, check_message
from moonpool.runtime.observing import tracing
from moonpool.runtime.observing.log import request_id
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import SERVER_NAME, NotPermitted, Unauthenticated

log = logging.getLogger(__name__)

MAX_MESSAGE_NBYTES = 64 << 20
_REQUEST_ID = "moonpool-request-id"
_ERROR_KIND = "moonpool-error"
# Calls that began before a change of certificates may last this long.
_OLD_CALLS_S = 3600.0

_REFUSED = Counter("moonpool_rpc_refused", "Calls refused at the boundary, by reason.", ["reason"])

_COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    # The loss of a host is noticed after keepalive time + timeout, the death of a process at once.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    # A node that restarts on the same address is reconnected within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Addresses of a cluster are direct: ignore proxies of the environment.
    ("grpc.enable_http_proxy", 0),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # By default a second process may silently share a port in use.
    ("grpc.so_reuseport", 0),
]

Servicer = tuple[Callable[[Any, Any], None], object]


async def serve(servicers: Sequence[Servicer], host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Start a server for pairs of ``(add_XServicer_to_server, servicer)``; return it and its port (0: any).

    A request with a number out of its range is refused before a method sees it. A ``MoonpoolError`` raised
    by a method becomes its ``code`` with its text as details; any other exception is logged and becomes
    INTERNAL.

    Raises:
        PortInUse: another process listens there.
    """
    security = process.current()
    server = grpc.aio.server(interceptors=[_Boundary(security)], options=_SERVER_OPTIONS)
    for add, servicer in servicers:
        add(servicer, server)
    try:
        if security.has_tls:
            bound_port = server.add_secure_port(f"{host}:{port}", security.server_credentials())
        else:
            bound_port = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise PortInUse(host, port, "node.port") from error
    await server.start()
    return server, bound_port


def channel(address: str) -> grpc.aio.Channel:
    """A channel to ``host:port``; it connects on first use and reconnects after failures.

    Calls prove the identity of this process (see ``security.process``); changed certificates are used from
    the next call on. A reply with a number out of its range raises ``NumberOutOfRange``; ``node_errors``
    converts it.
    """
    return cast(grpc.aio.Channel, _Channel(address, process.current()))


def _connection(address: str, security: process.Security) -> grpc.aio.Channel:
    if not security.has_tls:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    # Nodes change their addresses: their certificates are valid for one name.
    options = [*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME)]
    return grpc.aio.secure_channel(address, security.channel_credentials(), options=options)


def request_metadata() -> tuple[tuple[str, str], ...]:
    """``metadata=`` of a call for a request: propagates ``log.request_id`` and the current span.

    No interceptor does this, because grpc.aio runs an intercepted call in a separate task.
    """
    about = request_id.get()
    return ((_REQUEST_ID, about), *tracing.outgoing_headers()) if about else ()


@contextmanager
def node_errors(node_id: str) -> Iterator[None]:
    """Convert gRPC errors of a call to ``node_id`` to ``NodeUnavailable`` or ``RemoteError``."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        status, details = error.code().name, error.details() or ""
        kind = _value(error.trailing_metadata(), _ERROR_KIND)
        # Without a kind the status is gRPC's: connection failed or lost, or deadline exceeded.
        if not kind and status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"):
            reason = details if status == "UNAVAILABLE" else f"{status.lower()}: {details}"
            raise NodeUnavailable(node_id, reason) from error
        raise RemoteError(node_id, kind, status, details) from error
    except NumberOutOfRange as error:
        raise RemoteError(node_id, type(error).__name__, "DATA_LOSS", f"its reply: {error}") from error


class _Channel:
    """A channel whose calls are signed, and check their replies. No interceptor: see ``request_metadata``."""

    def __init__(self, address: str, security: process.Security) -> None:
        self._address = address
        self._security = security
        self._state = security.state_of_files()
        self._channel = _connection(address, security)
        self._closing: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, self)

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    async def close(self, grace: float | None = None) -> None:
        for closing in self._closing:
            closing.cancel()
        await self._channel.close(grace)

    def unary_unary(self, *args: Any, **options: Any) -> Callable[..., _CheckedCall]:
        return self._calls("unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., _CheckedCall]:
        return self._calls("unary_stream", args, options)

    def _calls(self, kind: str, args: Sequence[Any], options: dict[str, Any]) -> Callable[..., _CheckedCall]:
        method = _short(str(args[0]))
        made: tuple[grpc.aio.Channel | None, Any] = (None, None)

        def call(*request: Any, **about: Any) -> _CheckedCall:
            nonlocal made
            self._renew()
            if made[0] is not self._channel:
                made = (self._channel, getattr(self._channel, kind)(*args, **options))
            if proof := self._security.metadata(method):
                about["metadata"] = (*(about.get("metadata") or ()), *proof)
            return _CheckedCall(made[1](*request, **about))

        return call

    def _renew(self) -> None:
        """After a change of the certificates: a new connection. Calls on the old one finish."""
        state = self._security.state_of_files()
        if state != self._state:
            self._state, old = state, self._channel
            self._channel = _connection(self._address, self._security)
            closing = asyncio.create_task(old.close(_OLD_CALLS_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


class _CheckedCall:
    """A call in progress: awaited or iterated."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._replies: AsyncIterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        reply = yield from self._call.__await__()
        check_message(reply)
        return reply

    def __aiter__(self) -> _CheckedCall:
        return self

    async def __anext__(self) -> Any:
        if self._replies is None:
            self._replies = aiter(self._call)
        reply = await anext(self._replies)
        check_message(reply)
        return reply


def _value(metadata: Any, key: str) -> str:
    return next((str(value) for name, value in metadata or () if name == key), "")


class _Boundary(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Admits callers, restores the request id and maps errors for every method of a server."""

    def __init__(self, security: process.Security) -> None:
        self._security = security

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None  # no such method: gRPC answers UNIMPLEMENTED
        about = _value(details.invocation_metadata, _REQUEST_ID)
        parent = _value(details.invocation_metadata, tracing.TRACEPARENT)
        token = _value(details.invocation_metadata, process.TOKEN)

        def admit(context: Any) -> None:
            try:
                who = self._security.admit(_short(details.method), token, context.auth_context)
            except (Unauthenticated, NotPermitted) as error:
                _REFUSED.labels(type(error).__name__).inc()
                log.warning("%s refused a call of %s: %s", _short(details.method), context.peer(), error)
                raise
            process.caller.set(who)

        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, details.method, about, parent, admit),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, details.method, about, parent, admit),
                handler.request_deserializer,
                handler.response_serializer,
            )
        raise NotImplementedError(f"{details.method}: client streams are not used in Moonpool")


def _unary(
    behaviour: Any, method: str, about: str, parent: str, admit: Callable[[Any], None]
) -> Callable[[Any, Any], Any]:
    async def call(request: Any, context: Any) -> Any:
        request_id.set(about)
        try:
            with tracing.server_span(_short(method), parent), _logged(method, about):
                admit(context)
                check_message(request)
                return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return call


def _stream(
    behaviour: Any, method: str, about: str, parent: str, admit: Callable[[Any], None]
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        request_id.set(about)
        try:
            with tracing.server_span(_short(method), parent), _logged(method, about):
                admit(context)
                check_message(request)
                async for response in behaviour(request, context):
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return call


@contextmanager
def _logged(method: str, about: str) -> Iterator[None]:
    """Log the duration of a request's call at level debug."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        if about:
            log.debug("%s took %.4f s", _short(method), time.monotonic() - began_s)


def _short(method: str) -> str:
    """``/moonpool.PrefillNode/Prefill`` as ``PrefillNode/Prefill``."""
    return method.removeprefix("/moonpool.")


async def _abort(context: Any, error: Exception, method: str) -> None:
    if isinstance(error, MoonpoolError):
        code, sentence = grpc.StatusCode[error.code], str(error)
    else:
        log.exception("%s failed", method)
        code, sentence = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
    await context.abort(code, sentence, ((_ERROR_KIND, type(error).__name__),))
