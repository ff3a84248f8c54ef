"""The aiohttp application of the API and the dashboard, and its server."""

from __future__ import annotations

import asyncio
import logging
import re

from aiohttp import web
from aiohttp.typedefs import Handler

from moonpool.conductor.access import sign_in
from moonpool.conductor.access.gate import PRINCIPAL
from moonpool.conductor.accounts.page import usage
from moonpool.conductor.api import adapter_routes as adapters
from moonpool.conductor.api import fleet_routes as fleet
from moonpool.conductor.api import status_routes as pages
from moonpool.conductor.api.context import CONTEXT, ApiContext
from moonpool.conductor.api.endpoints import tokens
from moonpool.conductor.api.endpoints.generation import chat_completions, completions
from moonpool.conductor.api.endpoints.prefetch import prefetch
from moonpool.conductor.api.endpoints.responses import responses
from moonpool.conductor.api.errors import ApiError, as_api_error
from moonpool.conductor.api.exchange import REQUEST_ID, REQUEST_ID_HEADER
from moonpool.conductor.api.models.lanes import LANES, Lanes
from moonpool.conductor.api.openapi import openapi
from moonpool.conductor.canary import routes as canary
from moonpool.conductor.cells import routes as cells
from moonpool.conductor.coordination import siblings
from moonpool.conductor.dashboard import routes as dashboard_routes
from moonpool.conductor.dashboard.benchmark_results import BenchResults
from moonpool.conductor.dashboard.routes import LiveFeed
from moonpool.runtime.network.http_connections import BoundedRunner
from moonpool.runtime.network.http_listening import listen
from moonpool.runtime.observing import audit

log = logging.getLogger(__name__)

# How long streams that are handed over may take to end: Redis has what was sent by then.
_HAND_OVER_S = 5.0
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_app(context: ApiContext, lanes: Lanes | None = None) -> web.Application:
    """All routes; each has its entry in ``access.roles``. ``lanes``: all models; None: that of ``context``.

    Needs ``handler_cancellation``: closing a connection must cancel its request.
    """
    app = web.Application(middlewares=[_boundary], client_max_size=context.options.max_body_nbytes)
    app[CONTEXT] = context
    lanes = app[LANES] = lanes or Lanes.alone(context)
    app[dashboard_routes.FEED] = LiveFeed(context, lanes)
    app[dashboard_routes.RESULTS] = BenchResults(context.options.results_path)
    app.on_response_prepare.append(_prepare)
    app.on_shutdown.append(_end_live)
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/responses", responses),
            web.post("/v1/prefetch", prefetch),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
            web.post("/v1/embeddings", tokens.embeddings),
            web.get("/v1/models", pages.models),
            web.get("/v1/models/{name:.+}", pages.model),
            web.post("/v1/load_lora_adapter", adapters.load),
            web.post("/v1/unload_lora_adapter", adapters.unload),
            web.get("/v1/cluster", pages.cluster),
            web.get("/v1/cell", cells.summary),
            web.get("/v1/cell/prefixes", cells.offered),
            web.post("/v1/cell/prefixes", cells.take),
            web.get("/v1/fleet", fleet.listed),
            web.post("/v1/fleet/scale/{role}/{count}", fleet.scale),
            web.post("/v1/fleet/switch/{node}/{role}", fleet.switch),
            web.post("/v1/fleet/switch/{node}/model/{name}", fleet.switch_model),
            web.post("/v1/fleet/drain/{node}", fleet.drain),
            web.get("/v1/fleet/rollout", fleet.rollout_status),
            web.post("/v1/fleet/rollout", fleet.rollout),
            web.post("/v1/fleet/rollout/abort", fleet.abort_rollout),
            web.get("/v1/fleet/canary", canary.status),
            web.post("/v1/fleet/canary/{name}/start/{candidate}/{share}", canary.start),
            web.post("/v1/fleet/canary/{name}/share/{share}", canary.change_share),
            web.post("/v1/fleet/canary/{name}/promote", canary.promote),
            web.post("/v1/fleet/canary/{name}/rollback", canary.roll_back),
            web.get("/v1/about", pages.about),
            web.get("/v1/report", pages.report),
            web.get("/v1/benchmarks", dashboard_routes.benchmarks),
            web.get("/v1/benchmarks/{name}", dashboard_routes.benchmark),
            web.get("/v1/prometheus-targets", pages.prometheus_targets),
            web.get("/v1/index/{node}", pages.index),
            web.get("/v1/live", dashboard_routes.live),
            web.get("/v1/requests", pages.requests),
            web.get("/v1/usage", usage),
            web.get("/v1/requests/{id}/timeline", pages.timeline),
            web.post("/v1/requests/{id}/migrate", pages.migrate),
            web.get("/v1/session", sign_in.session),
            web.get("/sign-in", sign_in.page),
            web.post("/sign-in", sign_in.sign_in),
            web.post("/sign-out", sign_in.sign_out),
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
    """Assign the request id, ask the gate, turn errors into answers, count answers."""
    http, context = request, request.app[CONTEXT]
    offered = http.headers.get(REQUEST_ID_HEADER, "")
    http[REQUEST_ID] = offered if _CLIENT_ID.fullmatch(offered) else context.new_id()
    status = 499  # the client closed the connection before the answer
    try:
        try:
            context.gate.admit(http)
            response = await handler(http)
        except Exception as error:
            refusal = as_api_error(error)
            response = refusal.response()
            if refusal.status in (401, 403):
                _refused(http, refusal)
        status = response.status
        return response
    finally:
        if context.gate.is_administrative(http) and status not in (401, 403):
            outcome = "ok" if status == 200 else str(status)
            audit.administrative(
                f"{http.method} {http.path}", outcome, who=str(http[PRINCIPAL]), origin=http.remote or ""
            )
        resource = http.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        method = http.method if http.method in ("GET", "HEAD", "POST") else "other"
        context.metrics.http.labels(route, method, str(status)).inc()


def _refused(http: web.Request, refusal: ApiError) -> None:
    audit.refused(
        f"{http.method} {http.path}",
        str(refusal),
        who=str(http[PRINCIPAL]),
        origin=http.remote or "",
        kind=refusal.error_code or str(refusal.status),
        request_id=http[REQUEST_ID],
    )


async def _prepare(http: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in http:
        response.headers[REQUEST_ID_HEADER] = http[REQUEST_ID]
    if http.app[CONTEXT].leaving:
        # So that a load balancer does not keep the connection for its next request.
        response.headers["Connection"] = "close"
        response.force_close()


async def _end_live(app: web.Application) -> None:
    app[dashboard_routes.FEED].end()


class ApiServer:
    """Serves the application from ``start`` to ``close``."""

    def __init__(self, context: ApiContext, lanes: Lanes | None = None, *, shares_port: bool = False) -> None:
        """``lanes``: all models; None: that of ``context`` alone. ``shares_port``: with other workers."""
        self._context = context
        self._shares_port = shares_port
        self._lanes = lanes or Lanes.alone(context)
        # Handlers are cancelled when their connection closes; ``drain`` waits for them.
        self._runner = BoundedRunner(
            create_app(context, self._lanes), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        self._site: web.TCPSite | None = None
        self.scheme = "http"
        self.port = 0
        self.worker_port = 0  # where other workers ask; 0: there are none

    async def start(self) -> None:
        """Listen. Raises ``PortInUse``, ``ConfigError``; nothing is open then."""
        self._site, self.scheme = await listen(
            self._runner, self._context.options, shares_port=self._shares_port
        )
        self.port = int(self._runner.addresses[0][1])
        if self._shares_port:
            await web.TCPSite(self._runner, siblings.HOST, 0).start()
            self.worker_port = int(self._runner.addresses[-1][1])

    async def drain(self, within_s: float, leave_s: float = 0.0) -> bool:
        """Be not ready, serve ``leave_s`` longer, stop accepting requests and wait for running ones.

        Streams that can be resumed are left to another conductor: at once if one lives, else ``within_s``
        later. False: others still run by then.
        """
        self._context.leaving = True
        if leave_s:
            log.info("not ready; requests are accepted for %g s more (conductor.leave_s)", leave_s)
            await asyncio.sleep(leave_s)
        self._context.draining = True
        self._runner.app[dashboard_routes.FEED].end()
        if self._site is not None:
            await self._site.stop()
            self._site = None
        if self._context.conductor.num_successors:
            self._lanes.hand_over()
        if await self._idle(within_s):
            return True
        self._lanes.hand_over()
        if not await self._idle(_HAND_OVER_S):
            log.warning("some requests still run after %.1f s of draining and are cancelled", within_s)
            return False
        return True

    async def _idle(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._context.idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Close all connections, which cancels their requests. Idempotent."""
        await self._runner.cleanup()
