"""Mutual TLS for TCP connections: both ends have certificates of one authority."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from moonpool.runtime.config.options import TlsOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.network.sockets import tls_retried


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """The contexts of our ends of connections, by role."""

    client: ssl.SSLContext
    server: ssl.SSLContext


def tls_contexts(options: TlsOptions) -> TlsContexts | None:
    """Load certificates and keys; None: TLS is off. Raises ConfigError when a file is missing or invalid."""
    if not options.cert:
        return None
    try:
        return TlsContexts(_context(options, client=True), _context(options, client=False))
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"transfer.tls: cannot use {options.cert}, {options.key}, {options.ca}: {error}", "transfer.tls"
        ) from error


def _context(options: TlsOptions, *, client: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Nodes change their addresses. The authority and the cluster's secret identify them.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(options.ca)
    context.load_cert_chain(options.cert, options.key)
    return context


async def secure(sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> ssl.SSLSocket:
    """Start TLS on a connected, non-blocking ``sock``, which is taken over, and closed on any error.

    Raises OSError when the other side has no certificate of the same authority, or does not speak TLS.
    """
    secured = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    try:
        await tls_retried(secured, secured.do_handshake)
    except ssl.SSLError as error:
        secured.close()
        raise ConnectionAbortedError(
            f"the TLS handshake failed ({error}); transfer.tls must be the same on all nodes"
        ) from error
    except BaseException:
        secured.close()
        raise
    return secured
