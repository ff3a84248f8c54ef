"""The /metrics page of a process that has no HTTP server of its own."""

from __future__ import annotations

import errno

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from moonpool.runtime.errors import PortInUse


def serve_metrics(host: str, port: int, registry: CollectorRegistry = REGISTRY) -> int:
    """Serve ``registry`` from a daemon thread; returns the port (0 picks a free one).

    Raises:
        PortInUse: somebody else listens there.
    """
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(host, port, "node.metrics_port") from error
        raise
    return server.server_port
