"""The aiohttp application of a router of cells."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from moonpool.conductor.access.gate import PRINCIPAL
from moonpool.conductor.api.errors import as_api_error
from moonpool.conductor.api.status_routes import healthz, reply
from moonpool.conductor.cells import metrics
from moonpool.conductor.cells.router import Router
from moonpool.runtime.observing import audit

ROUTER = web.AppKey("router", Router)
_PASSED_ON = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/prefetch"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name:.+}"),
    ("GET", "/v1/requests/{id}/timeline"),
)


def create_app(router: Router, max_body_nbytes: int) -> web.Application:
    """Needs ``handler_cancellation``: closing a connection must cancel its request in the cell, too.

    Every route is one of a conductor's, and has its entry in ``access.roles``.
    """
    app = web.Application(middlewares=[_boundary], client_max_size=max_body_nbytes)
    app[ROUTER] = router
    for method, path in _PASSED_ON:
        app.router.add_route(method, path, router.forward)
    app.add_routes(
        [
            web.get("/v1/cluster", _cluster),
            web.get("/healthz", healthz),
            web.get("/readyz", _readyz),
            web.get("/metrics", _metrics),
        ]
    )
    return app


@web.middleware
async def _boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ask the gate; turn errors into answers."""
    http = request
    try:
        http.app[ROUTER].gate.admit(http)
        return await handler(http)
    except Exception as error:
        refusal = as_api_error(error)
        if refusal.status in (401, 403):
            audit.refused(
                f"{http.method} {http.path}", str(refusal), who=str(http[PRINCIPAL]), origin=http.remote or ""
            )
        if http.match_info.handler == http.app[ROUTER].forward:
            metrics.requests.labels("", str(refusal.status)).inc()
        return refusal.response()


async def _cluster(http: web.Request) -> web.Response:
    """``GET /v1/cluster``: the cells, as this router knows them."""
    cells = http.app[ROUTER].cells
    found = [
        cell.status()
        | {"conductors": [{"url": one.url, "open": one.is_open, "trouble": one.trouble} for one in doors]}
        for cell, doors in cells.doors.items()
    ]
    return reply({"cells": found})


async def _readyz(http: web.Request) -> web.Response:
    """``GET /readyz``: 503 if no cell takes requests, or this router is draining."""
    router = http.app[ROUTER]
    ready = not router.leaving and any(cell.usable for cell in router.cells.doors)
    return reply({"ready": ready}, 200 if ready else 503)


async def _metrics(http: web.Request) -> web.Response:
    page = await asyncio.to_thread(generate_latest)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})
