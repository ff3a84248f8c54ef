"""Limits and keepalive of gRPC servers and channels, and the metadata that both ends know."""

from __future__ import annotations

from typing import Any

MAX_MESSAGE_NBYTES = 64 << 20
# Ours are below 1 KiB: a token, a request id, a trace.
_MAX_METADATA_NBYTES = 8 << 10
# Of one connection; further calls wait at the caller. More than the requests of a conductor on one node.
_MAX_CALLS = 4096
# From the connection until the caller has spoken HTTP/2, and TLS where there are certificates.
_HANDSHAKE_MS = 5_000
# Most connections of a server: a descriptor each. A cluster of 1,024 nodes needs about as many.
_MAX_CONNECTIONS = 8192
_UNCOMPRESSED = 1

REQUEST_ID = "moonpool-request-id"
ERROR_KIND = "moonpool-error"
FAILURE_CLASS = "moonpool-failure"

_COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_metadata_size", _MAX_METADATA_NBYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_NBYTES),
    # Messages are never compressed here. A compressed one may be a thousand times larger than it came.
    ("grpc.compression_enabled_algorithms_bitset", _UNCOMPRESSED),
    # The loss of a host is noticed after keepalive time + timeout, the death of a process at once.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    # A node that restarts on the same address is reconnected within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the longest that a connection may take: a busy node answers the first frame late.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A connection without calls stays: its state tells whether the server answers.
    ("grpc.client_idle_timeout_ms", (1 << 31) - 1),
    # Addresses of a cluster are direct: ignore proxies of the environment.
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", _MAX_CALLS),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
    # By default a second process may silently share a port in use.
    ("grpc.so_reuseport", 0),
]


def metadata_value(metadata: Any, key: str) -> str:
    """Return the value of ``key``, or an empty string."""
    return next((str(value) for name, value in metadata or () if name == key), "")


def short_name(method: str) -> str:
    """``/moonpool.PrefillNode/Prefill`` as ``PrefillNode/Prefill``."""
    return method.removeprefix("/moonpool.")
