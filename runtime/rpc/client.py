"""gRPC channels: signed calls, checked replies, renewed certificates, and errors as exceptions of ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import grpc
import grpc.aio

from moonpool.runtime.errors import NodeUnavailable, RemoteError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.message_checks import check_message
from moonpool.runtime.number_checks import NumberOutOfRange
from moonpool.runtime.observing import tracing
from moonpool.runtime.observing.log import request_id
from moonpool.runtime.rpc.bounds import (
    CHANNEL_OPTIONS,
    ERROR_KIND,
    FAILURE_CLASS,
    REQUEST_ID,
    metadata_value,
    short_name,
)
from moonpool.runtime.rpc.direct_client import DirectCall, DirectConnection, DirectStream
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import SERVER_NAME
from moonpool.runtime.security.tls import PeerTls

# How gRPC says that a channel was closed in this process.
_CLOSED = "Channel is closed."
# Calls that began before a change of certificates go on, streams for as long as the node lives. gRPC wants a
# number: 30 years.
_OLD_CALLS_S = 1e9


def channel(address: str, *, direct: bool = False) -> grpc.aio.Channel:
    """A channel to ``host:port``; it connects on first use and reconnects after failures.

    ``direct``: calls to a server of this host that takes such calls (``serve``) go over a Unix socket, in a
    fraction of the time; where certificates are demanded, and to other users' servers, over gRPC. They notice
    the end of the server's process; for one that does not answer, see ``lose``.

    Calls prove the identity of this process (see ``security.process``); changed certificates are used from
    the next call on. A reply with a number out of its range raises ``NumberOutOfRange``; ``node_errors``
    converts it.
    """
    return cast(grpc.aio.Channel, _Channel(address, process.current(), direct))


def lose(channel: grpc.aio.Channel) -> None:
    """Fail the direct calls in progress, as if the connection broke: the server does not answer any more.

    The state of ``channel``, whose gRPC connection is kept alive, tells that."""
    direct = cast(_Channel, channel).direct
    if direct is not None:
        direct.close()


def connection(api: Any, address: str, tls: PeerTls | None) -> Any:
    """A channel of ``api``, which is ``grpc`` or ``grpc.aio``."""
    # Addresses come from others: without a scheme, one such as unix:PATH would reach sockets of this machine.
    target = f"dns:///{address}"
    if tls is None:
        return api.insecure_channel(target, options=CHANNEL_OPTIONS)
    # Nodes change their addresses: their certificates are valid for one name.
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME)]
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    return api.secure_channel(target, credentials, options=options)


def request_metadata() -> tuple[tuple[str, str], ...]:
    """``metadata=`` of a call for a request: propagates ``log.request_id`` and the current span.

    No interceptor does this, because grpc.aio runs an intercepted call in a separate task.
    """
    about = request_id.get()
    return ((REQUEST_ID, about), *tracing.outgoing_headers()) if about else ()


@contextmanager
def node_errors(node_id: str) -> Iterator[None]:
    """Convert gRPC errors of a call to ``node_id`` to ``NodeUnavailable`` or ``RemoteError``."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        status, details = error.code().name, error.details() or ""
        kind = metadata_value(error.trailing_metadata(), ERROR_KIND)
        # Without a kind the status is gRPC's: connection failed or lost, or deadline exceeded.
        if not kind and status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"):
            reason = details if status == "UNAVAILABLE" else f"{status.lower()}: {details}"
            raise NodeUnavailable(node_id, reason) from error
        failure = FailureClass.of_wire(metadata_value(error.trailing_metadata(), FAILURE_CLASS))
        raise RemoteError(node_id, kind, status, details, failure) from error
    except NumberOutOfRange as error:
        raise RemoteError(node_id, type(error).__name__, "DATA_LOSS", f"its reply: {error}") from error
    except grpc.aio.UsageError as error:
        if str(error) != _CLOSED:
            raise
        # Its owner has given the node up; the call was not sent.
        raise NodeUnavailable(node_id, "the connection was closed here") from error


class _Channel:
    """A channel with signed calls that check their replies. No interceptor: see ``request_metadata``."""

    def __init__(self, address: str, security: process.Security, direct: bool) -> None:
        self._address = address
        self.direct = DirectConnection(address) if direct else None
        self._security = security
        self._tls = security.tls
        self._channel: grpc.aio.Channel = connection(grpc.aio, address, self._tls)
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, self)

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        for closing in self._closing:
            closing.cancel()
        if self.direct is not None:
            self.direct.close()
        await self._channel.close(grace)

    def unary_unary(self, *args: Any, **options: Any) -> Callable[..., _CheckedCall]:
        over_grpc = self._calls("unary_unary", args, options)
        if self.direct is None:
            return over_grpc
        return self._directly(partial(self.direct.begin, DirectCall), over_grpc, *args, **options)

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., _CheckedCall]:
        over_grpc = self._calls("unary_stream", args, options)
        if self.direct is None:
            return over_grpc
        return self._directly(partial(self.direct.begin, DirectStream), over_grpc, *args, **options)

    def _directly(
        self,
        begin: Callable[..., DirectCall | DirectStream | None],
        over_grpc: Callable[..., _CheckedCall],
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: Any,
    ) -> Callable[..., _CheckedCall]:
        method = short_name(path)

        def call(request: Any, *, timeout: float | None = None, metadata: Any = None) -> _CheckedCall:
            if not self._closed and self._security.tls is None:
                about = (*(metadata or ()), *self._security.metadata(method))
                message = request_serializer(request)
                began = begin(path, message, response_deserializer, timeout=timeout, metadata=about)
                if began is not None:
                    return _CheckedCall(began)
            return over_grpc(request, timeout=timeout, metadata=metadata)

        return call

    def _calls(self, kind: str, args: Sequence[Any], options: dict[str, Any]) -> Callable[..., _CheckedCall]:
        method = short_name(str(args[0]))
        made: tuple[grpc.aio.Channel | None, Any] = (None, None)

        def call(*request: Any, **about: Any) -> _CheckedCall:
            nonlocal made
            if self._closed:
                # Of a closed channel gRPC's core would use freed memory here, and abort the process.
                raise grpc.aio.UsageError(_CLOSED)
            self._renew()
            if made[0] is not self._channel:
                made = (self._channel, getattr(self._channel, kind)(*args, **options))
            if proof := self._security.metadata(method):
                about["metadata"] = (*(about.get("metadata") or ()), *proof)
            return _CheckedCall(made[1](*request, **about))

        return call

    def _renew(self) -> None:
        """After a change of the certificates: a new connection. Calls on the old one finish."""
        tls = self._security.tls
        if tls is not self._tls:
            self._tls, old = tls, self._channel
            self._channel = connection(grpc.aio, self._address, tls)
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
