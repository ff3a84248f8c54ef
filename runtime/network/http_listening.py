"""Listening for HTTP as ``conductor.host``, ``port``, ``cert`` and ``key`` say."""

from __future__ import annotations

from aiohttp import web

from moonpool.runtime.config.options import ConductorOptions
from moonpool.runtime.network.http_connections import BoundedRunner
from moonpool.runtime.network.sockets import no_listener
from moonpool.runtime.security import process
from moonpool.runtime.security.https import HttpsServer
from moonpool.runtime.security.posture import check_listening


async def listen(
    runner: BoundedRunner, options: ConductorOptions, *, shares_port: bool = False
) -> tuple[web.TCPSite, str]:
    """Set ``runner`` up and listen; returns the site and the URL's scheme.

    ``shares_port``: with other processes. Raises ``PortInUse``, ``ConfigError``; nothing is open then.
    """
    security = process.current()
    check_listening(security, options.host, "conductor.host")
    https = _https_of(options, security)
    await runner.setup()
    site = web.TCPSite(
        runner,
        options.host,
        options.port,
        backlog=1024,
        reuse_port=shares_port,
        ssl_context=https.context if https is not None else None,
    )
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise no_listener(error, options.host, options.port, "conductor.host", "conductor.port") from error
    return site, "http" if https is None else "https"


def _https_of(options: ConductorOptions, security: process.Security) -> HttpsServer | None:
    """The certificate of the API. None: plain HTTP. Raises ``ConfigError``."""
    if options.cert:
        https = HttpsServer(options.cert, options.key)
        security.watch("conductor.cert", lambda: https.certificate)
        return https
    ours = security.options
    return HttpsServer(ours.cert, ours.key) if ours.cert else None


def reachable(host: str) -> str:
    """The address to connect to for a listening address ``host``."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
