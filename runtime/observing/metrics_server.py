"""The /metrics page of a process without an HTTP server."""

from __future__ import annotations

import errno

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from moonpool.runtime.errors import PortInUse


def serve_metrics(host: str, port: int, registry: CollectorRegistry = REGISTRY) -> int:
    """Serve ``registry`` from a daemon thread and return the port (0: a free one).

    Raises:
        PortInUse: another process listens there.
    """
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(host, port, "node.metrics_port") from error
        raise
    return server.server_port
