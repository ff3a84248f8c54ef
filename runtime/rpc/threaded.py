"""gRPC over threads, for streams that must not wait for a busy event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc

from moonpool.runtime.rpc.bounds import SERVER_OPTIONS, metadata_value
from moonpool.runtime.rpc.client import connection
from moonpool.runtime.rpc.server import bind, count_refused
from moonpool.runtime.security import process
from moonpool.runtime.security.posture import check_listening
from moonpool.runtime.security.roles import NotPermitted, Unauthenticated


def threaded_channel(address: str) -> grpc.Channel:
    """A channel to ``host:port``. Give each call ``process.current().metadata(method)``."""
    return cast(grpc.Channel, connection(grpc, address, process.current().tls))


def serve_threaded(
    add: Callable[[Any, Any], None], servicer: object, host: str, port: int, *, option: str, max_calls: int
) -> tuple[grpc.Server, int]:
    """Start a server with a thread for each of ``max_calls`` calls; return it and its port (0: any). Its
    methods call ``admit`` first. ``option``: names host and port.

    Raises PortInUse, or ConfigError: ``host`` is no address of this machine, or other machines reach it and
    no caller would be authenticated.
    """
    security = process.current()
    check_listening(security, host.strip("[]"), option)
    pool = ThreadPoolExecutor(max_calls, thread_name_prefix="calls")
    server = grpc.server(pool, options=SERVER_OPTIONS, maximum_concurrent_rpcs=max_calls)
    add(servicer, server)
    bound_port = bind(server, security, host, port, option, option)
    server.start()
    return server, bound_port


def admit(security: process.Security, method: str, context: grpc.ServicerContext) -> None:
    """End the call unless its caller may make it. ``method``: as ``Node/Drain``."""
    token = metadata_value(context.invocation_metadata(), process.TOKEN)
    try:
        # grpc's stubs do not know that these are lists.
        security.admit(method, token, cast(Callable[[], Mapping[str, Sequence[bytes]]], context.auth_context))
    except (Unauthenticated, NotPermitted) as error:
        count_refused(context, method, error)
        context.abort(grpc.StatusCode[error.code], str(error))
