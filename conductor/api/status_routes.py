"""HTTP routes for models, health, metrics, cluster state and timelines."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from functools import partial
from typing import Any

import orjson
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from yarl import URL

from moonpool.conductor.access.gate import PRINCIPAL
from moonpool.conductor.api.context import CONTEXT
from moonpool.conductor.api.errors import ApiError
from moonpool.conductor.api.models.lanes import LANES, Lane
from moonpool.conductor.coordination.siblings import ask_siblings
from moonpool.conductor.observing.cluster_report import Served, cluster_report
from moonpool.conductor.observing.timelines.chrome import chrome_trace
from moonpool.conductor.observing.timelines.parts import explanation_of, parts_of, with_api
from moonpool.conductor.observing.timelines.spans import spans_of
from moonpool.protos import node_pb2
from moonpool.runtime.network.sockets import host_port
from moonpool.runtime.replicas.metrics_page import GROUP_TIMEOUT_S, read_page

MAX_LISTED = 512  # as many as are remembered: see ``RecentRequests``
TIMELINE_FORMATS = ("json", "chrome")
_MOST_TARGET_CHARS = 256


def reply(value: Any, status: int = 200) -> web.Response:
    """A JSON response; values without a JSON type are written as text."""
    body = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
    return web.Response(body=body, status=status, content_type="application/json")


async def models(http: web.Request) -> web.Response:
    """``GET /v1/models``"""
    created, lanes = http.app[CONTEXT].created_unix_s, http.app[LANES]
    names = [name for lane in lanes for name in (lane.name, *lane.aliases)]
    listed = [_model(lanes.known(name)[0], name, created) for name in (*names, *lanes.routes)]
    adapters = [_adapter(lane, one, created) for lane in lanes for one in lane.conductor.adapters.all()]
    return reply({"object": "list", "data": listed + adapters})


async def model(http: web.Request) -> web.Response:
    """``GET /v1/models/{name}``"""
    created, name = http.app[CONTEXT].created_unix_s, http.match_info["name"]
    lane, adapter = http.app[LANES].known(name)
    return reply(_model(lane, name, created) if adapter is None else _adapter(lane, adapter, created))


async def healthz(http: web.Request) -> web.Response:
    """``GET /healthz``: 200 while the process runs."""
    return reply({"status": "ok"})


async def readyz(http: web.Request) -> web.Response:
    """``GET /readyz``: 503 if no request could be served; 200 if ready or degraded.

    Where keys are configured, what is degraded is told only to those with a key.
    """
    context = http.app[CONTEXT]
    ready, degraded = http.app[LANES].ready()
    if context.leaving:
        ready, degraded = False, ["draining", *degraded]
    status = "not ready" if not ready else "degraded" if degraded else "ready"
    told = {"degraded": degraded} if http[PRINCIPAL].role else {}
    return reply({"ready": ready, "status": status} | told, 200 if ready else 503)


async def metrics(http: web.Request) -> web.Response:
    """``GET /metrics``, rendered in a thread: a large page would block all streams for 10 ms.

    As OpenMetrics, with the ids of requests as exemplars, for those that ask for it in ``Accept``. Of several
    workers: all of them, with the label ``replica``, never as OpenMetrics.
    """
    context = http.app[CONTEXT]
    if context.workers_page:
        try:
            merged = await asyncio.to_thread(read_page, context.workers_page, GROUP_TIMEOUT_S)
        except OSError as error:
            why = f"the page of all workers cannot be read: {error}"
            raise ApiError(503, why, code="metrics_unavailable") from error
        return web.Response(body=merged.encode(), headers={"Content-Type": CONTENT_TYPE_LATEST})
    context.metrics.see_cluster(http.app[LANES].counts())
    encode, content_type = generate_latest, CONTENT_TYPE_LATEST
    if "application/openmetrics-text" in http.headers.get("Accept", ""):
        # Unescaped: the other encodings make vllm_… of the names of samples, and leave those of families.
        encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
        content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    page = await asyncio.to_thread(encode, context.metrics.registry)
    return web.Response(body=page, headers={"Content-Type": content_type})


async def cluster(http: web.Request) -> web.Response:
    """``GET /v1/cluster``"""
    return reply(http.app[LANES].cluster())


async def about(http: web.Request) -> web.Response:
    """``GET /v1/about``: code, machine and options of this conductor, without secrets."""
    return reply(http.app[CONTEXT].about)


async def report(http: web.Request) -> web.Response:
    """``GET /v1/report``: the cluster as ``runtime.reports.report`` describes a run: conditions, and figures
    of all requests since this conductor's start."""
    context = http.app[CONTEXT]
    served = [
        Served(
            lane.name,
            lane.conductor.cluster(),
            {} if lane.loaded is None else lane.loaded.metrics.snapshot(),
        )
        for lane in http.app[LANES]
    ]
    return reply(cluster_report(context.about, served, context.unix_clock()).as_json())


async def prometheus_targets(http: web.Request) -> web.Response:
    """``GET /v1/prometheus-targets``: the nodes' /metrics, for Prometheus' HTTP service discovery."""
    targets = []
    for node in http.app[LANES].cluster()["nodes"]:
        if node["metrics_url"]:
            url = URL(node["metrics_url"])
            labels = {"node": node["node_id"], "role": node["role"], "__metrics_path__": url.path}
            targets.append({"targets": [host_port(url.host or "", url.port or 80)], "labels": labels})
    return reply(targets)


async def index(http: web.Request) -> web.StreamResponse:
    """``GET /v1/index/{node}``: its blocks in the index mirror, as ``kvstore.index.redis.changes``."""
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    await response.prepare(http)
    node = http.match_info["node"]
    async for batch in http.app[LANES].of_node(node).index_blocks(node):
        await response.write(batch)
    await response.write_eof()
    return response


async def requests(http: web.Request) -> web.Response:
    """``GET /v1/requests?limit=N``: the latest requests that the caller may see, newest first."""
    text = http.query.get("limit", "50")
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_LISTED:
        raise ApiError(400, f"limit: must be from 1 to {MAX_LISTED}, got {text[:32]!r}", param="limit")
    latest, timeline_of = (
        http.app[CONTEXT].recent.latest(int(text), http[PRINCIPAL].scope),
        http.app[LANES].timeline,
    )
    return reply({"object": "list", "data": [record.see(timeline_of).to_dict() for record in latest]})


async def timeline(http: web.Request) -> web.Response:
    """``GET /v1/requests/{id}/timeline``: by the id of the answer or a choice, or by x-request-id.

    With several sequences, their timelines are under ``sequences``. ``api``: times of the API itself.
    ``parts``: where a sequence's time went; they sum to that of its last event. ``explanation``: the longest.
    ``?format=chrome``: a trace for Perfetto (ui.perfetto.dev) or chrome://tracing instead.
    """
    form = http.query.get("format", "json")
    if form not in TIMELINE_FORMATS:
        raise ApiError(400, f"format: must be json or chrome, got {form[:32]!r}", param="format")
    context, asked, principal = http.app[CONTEXT], http.match_info["id"], http[PRINCIPAL]
    record = context.recent.find(asked, principal.scope)
    names = record.sequences if record is not None else [asked]
    timelines = map(http.app[LANES].timeline, names)
    found = [
        one.to_dict(principal.scope) for one in timelines if one is not None and principal.sees(one.tenant)
    ]
    if record is None and not found:
        if (answer := await ask_siblings(http, context.conductor.sibling_ports)) is not None:
            return answer
        raise ApiError(
            404,
            f"no request {asked[:128]!r} is known: ids are kept for a while after the answer",
            param="id",
            code="request_not_found",
        )
    api = record.to_dict() if record is not None else None
    for one in found:
        one["spans"] = [asdict(span) for span in spans_of(one)]
        parts = parts_of(one)
        if record is not None and len(names) == 1:
            parts = with_api(parts, record.e2e_s, record.delivered_s)
        one["parts"] = [asdict(part) | {"sentence": part.sentence} for part in parts]
        one["explanation"] = explanation_of(parts)
    alone = len(names) == 1 and found
    told = (found[0] if alone else {"request_id": asked, "sequences": found}) | {"api": api}
    return reply(chrome_trace(told) if form == "chrome" else told)


async def migrate(http: web.Request) -> web.Response:
    """``POST /v1/requests/{id}/migrate?target=NODE``: move a running request's sequences to another decode
    node; without a target, each to the one that suits it best. 409: one did not move; it goes on."""
    context, asked = http.app[CONTEXT], http.match_info["id"]
    record = context.recent.find(asked, http[PRINCIPAL].scope)
    names = record.sequences if record is not None else [asked]
    target = http.query.get("target", "")[:_MOST_TARGET_CHARS]
    moved = [await http.app[LANES].of_request(name).migrate(name, target) for name in names]
    return reply(
        {
            "request_id": asked,
            "moves": [
                {
                    "source": one.source,
                    "target": one.target,
                    "num_blocks": one.received.num_blocks,
                    "num_last_blocks": one.received.num_last_blocks,
                    "nbytes": one.received.nbytes,
                    "downtime_s": one.downtime_s,
                }
                for one in moved
            ],
        }
    )


def _model(lane: Lane, name: str, created: int) -> dict[str, Any]:
    """``name``: of the model, or one of its aliases."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "moonpool",
        "root": lane.name,
        "parent": None,
        "max_model_len": lane.conductor.model.max_model_len,
    }


def _adapter(lane: Lane, adapter: node_pb2.Adapter, created: int) -> dict[str, Any]:
    base = _model(lane, lane.name, created)
    return base | {"id": adapter.name, "root": adapter.path, "parent": base["id"]}
