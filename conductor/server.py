"""The aiohttp application of the API and the dashboard, and its server."""

from __future__ import annotations

import asyncio
import errno
import logging
import re

from aiohttp import web
from aiohttp.typedefs import Handler

from moonpool.conductor.api import status_routes as pages
from moonpool.conductor.api.context import CONTEXT, ApiContext
from moonpool.conductor.api.errors import as_api_error
from moonpool.conductor.api.exchange import REQUEST_ID, REQUEST_ID_HEADER, chat_completions, completions
from moonpool.conductor.api.openapi import openapi
from moonpool.conductor.dashboard import routes as dashboard_routes
from moonpool.conductor.dashboard.benchmark_results import BenchResults
from moonpool.conductor.dashboard.routes import LiveFeed
from moonpool.runtime.errors import PortInUse

log = logging.getLogger(__name__)

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_app(context: ApiContext) -> web.Application:
    """All routes. Needs ``handler_cancellation``: closing a connection must cancel its request."""
    app = web.Application(middlewares=[_boundary], client_max_size=context.options.max_body_nbytes)
    app[CONTEXT] = context
    app[dashboard_routes.FEED] = LiveFeed(context)
    app[dashboard_routes.RESULTS] = BenchResults(context.options.results_path)
    app.on_response_prepare.append(_prepare)
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.get("/v1/models", pages.models),
            web.get("/v1/models/{name:.+}", pages.model),
            web.get("/v1/cluster", pages.cluster),
            web.get("/v1/about", pages.about),
            web.get("/v1/benchmarks", dashboard_routes.benchmarks),
            web.get("/v1/benchmarks/{name}", dashboard_routes.benchmark),
            web.get("/v1/prometheus-targets", pages.prometheus_targets),
            web.get("/v1/index/{node}", pages.index),
            web.get("/v1/live", dashboard_routes.live),
            web.get("/v1/requests", pages.requests),
            web.get("/v1/requests/{id}/timeline", pages.timeline),
            web.get("/openapi.json", openapi),
            web.get("/healthz", pages.healthz),
            web.get("/readyz", pages.readyz),
            web.get("/metrics", pages.metrics),
            web.get("/", dashboard_routes.dashboard),
            web.get("/static/{name:.+}", dashboard_routes.static),
        ]
    )
    return app


@web.middleware
async def _boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Assign the request id, turn errors into answers, count answers."""
    http, context = request, request.app[CONTEXT]
    offered = http.headers.get(REQUEST_ID_HEADER, "")
    http[REQUEST_ID] = offered if _CLIENT_ID.fullmatch(offered) else context.new_id()
    status = 499  # the client closed the connection before the answer
    try:
        try:
            response = await handler(http)
        except Exception as error:
            response = as_api_error(error).response()
        status = response.status
        return response
    finally:
        resource = http.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        method = http.method if http.method in ("GET", "HEAD", "POST") else "other"
        context.metrics.http.labels(route, method, str(status)).inc()


async def _prepare(http: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in http:
        response.headers[REQUEST_ID_HEADER] = http[REQUEST_ID]
    if http.app[CONTEXT].leaving:
        # So that a load balancer does not keep the connection for its next request.
        response.headers["Connection"] = "close"
        response.force_close()


class ApiServer:
    """Serves the application from ``start`` to ``close``."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        # Handlers are cancelled when their connection closes; ``drain`` waits for them.
        self._runner = web.AppRunner(
            create_app(context), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        self._site: web.TCPSite | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises ``PortInUse``; nothing is open then."""
        host, port = self._context.options.host, self._context.options.port
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(host, port, "conductor.port") from error
            raise
        self._site = site
        self.port = int(self._runner.addresses[0][1])

    async def drain(self, within_s: float, leave_s: float = 0.0) -> bool:
        """Be not ready, serve ``leave_s`` longer, stop accepting requests and wait for running ones.

        False: some still run ``within_s`` later.
        """
        self._context.leaving = True
        if leave_s:
            log.info("not ready; requests are accepted for %g s more (conductor.leave_s)", leave_s)
            await asyncio.sleep(leave_s)
        self._context.draining = True
        if self._site is not None:
            await self._site.stop()
            self._site = None
        try:
            async with asyncio.timeout(within_s):
                await self._context.idle.wait()
        except TimeoutError:
            log.warning("some requests still run after %.1f s of draining and are cancelled", within_s)
            return False
        return True

    async def close(self) -> None:
        """Close all connections, which cancels their requests. Idempotent."""
        await self._runner.cleanup()
