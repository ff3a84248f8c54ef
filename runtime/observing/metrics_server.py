"""The /metrics page of a process without an HTTP server."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from socketserver import ThreadingMixIn
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app

from moonpool.runtime.network.sockets import loopback_only, no_listener
from moonpool.runtime.observing import audit
from moonpool.runtime.security import process
from moonpool.runtime.security.posture import check_listening
from moonpool.runtime.security.process import Security

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

# Of engines: their latest requests.
REQUESTS_PAGE = "/requests"
# Each connection is a thread. One address gets half of them.
MAX_CONNECTIONS = 64
# From the connection to the end of the answer: a slow client is disconnected.
CONNECTION_S = 10.0
_NO_PAGES: Mapping[str, Callable[[], bytes]] = MappingProxyType({})


def serve_metrics(
    host: str,
    port: int,
    registry: CollectorRegistry = REGISTRY,
    *,
    keyed: bool = False,
    pages: Mapping[str, Callable[[], bytes]] = _NO_PAGES,
) -> MetricsServer:
    """Serve ``registry``, and ``pages`` of JSON by their path, from a daemon thread, at ``port`` (0: a free
    one).

    In a cluster with a key the page needs ``metrics_key`` as a bearer token where other machines reach
    ``host``, or if ``keyed``; ``/healthz`` never does.

    Raises:
        PortInUse: another process listens there.
        ConfigError: other machines reach ``host``, and security is not set up; or no socket can listen there.
    """
    me = process.current()
    check_listening(me, host, "node.host")
    demanded = me.demands_key and (keyed or not loopback_only(host))
    try:
        server = make_server(
            host,
            port,
            _Page(make_wsgi_app(registry), pages, metrics_key(me.derived_key) if demanded else ""),
            _Server6 if ":" in host else _Server,
            handler_class=_SilentHandler,
        )
    except OSError as error:
        raise no_listener(error, host, port, "node.host", "node.metrics_port") from error
    threading.Thread(target=server.serve_forever, name="metrics page", daemon=True).start()
    return MetricsServer(server)


class MetricsServer:
    """``port``: where it listens."""

    def __init__(self, server: WSGIServer) -> None:
        self.port = server.server_port
        self._server = server

    def close(self) -> None:
        """Stop listening, within half a second; returns at once. A process that ends need not call it."""

        def end() -> None:
            self._server.shutdown()
            self._server.server_close()

        threading.Thread(target=end, name="metrics page ends", daemon=True).start()


def metrics_key(derived_key: Callable[[str], bytes]) -> str:
    """The bearer token of the pages of a cluster's nodes, from the cluster's key."""
    return derived_key("pages of metrics").hex()


def own_metrics_key() -> str:
    """The bearer token that this process has for nodes' pages; empty: none."""
    me = process.current()
    return metrics_key(me.derived_key) if me.has_key else ""


def metrics_headers(security: Security) -> dict[str, str]:
    """The headers to read the page of a node with; none: this process has no key."""
    return {"Authorization": f"Bearer {metrics_key(security.derived_key)}"} if security.has_key else {}


class _Page:
    """The pages behind their key, and ``/healthz``."""

    def __init__(self, page: WSGIApplication, pages: Mapping[str, Callable[[], bytes]], key: str) -> None:
        """``key``: empty for none."""
        self._page = page
        self._pages = pages
        self._expected = f"Bearer {key}".encode() if key else b""

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode()
        path, kind = str(environ.get("PATH_INFO")), "text/plain"
        if path == "/healthz":
            status, text = "200 OK", b"ok\n"
        elif self._expected and not hmac.compare_digest(given, self._expected):
            status, text = "401 Unauthorized", b"send the key that `moonpool certs metrics` prints\n"
            asked, origin = path if path in self._pages else "/metrics", str(environ.get("REMOTE_ADDR", ""))
            audit.refused(f"GET {asked}", "the key is missing or another's", origin=origin)
        elif path in self._pages:
            status, text, kind = "200 OK", self._pages[path](), "application/json"
        else:
            return self._page(environ, start)
        start(status, [("Content-Type", kind), ("Content-Length", str(len(text)))])
        return [text]


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a connection, within bounds. The thread of ``serve_forever`` accepts and disconnects."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, *args: Any, **options: Any) -> None:
        self._open: dict[Any, tuple[str, float]] = {}  # address and time of each connection
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        addresses = [address for address, _ in list(self._open.values())]
        own = addresses.count(client_address[0])
        if len(addresses) >= MAX_CONNECTIONS or own >= MAX_CONNECTIONS // 2:
            self.shutdown_request(request)
            return
        self._open[request] = client_address[0], time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second."""
        for request, (_, since_s) in list(self._open.items()):
            if time.monotonic() - since_s > CONNECTION_S:
                with suppress(OSError):  # it is just being closed
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours."""


class _Server6(_Server):
    address_family = socket.AF_INET6
