"""What routers of cells ask a conductor: how it is, and hot prefixes to carry from one cell to another."""

from __future__ import annotations

from typing import Final

import orjson
from aiohttp import web

from moonpool.conductor.api.context import CONTEXT
from moonpool.conductor.api.errors import bad_request, forbidden
from moonpool.conductor.api.models.lanes import LANES
from moonpool.conductor.api.request_body import read_object
from moonpool.conductor.api.status_routes import reply
from moonpool.kvstore.errors import EntryRefused
from moonpool.kvstore.index.redis.node_record import ROLES

FRESH_S: Final = 0.5
"""How long an answer is given again: routers may be many."""
_HOT: Final = 64  # those with less than some percent of a cell's requests do not matter
_SERVING: Final = ("ready", "unhealthy")  # states of nodes that take requests


async def summary(http: web.Request) -> web.Response:
    """``GET /v1/cell``: what routers need to know, up to ``FRESH_S`` old.

    ``num_requests``: in flight at this conductor, one of ``num_conductors``. ``hot``: digests of
    ``cells.prefixes`` with the requests a second that began with them here.
    """
    context, lanes = http.app[CONTEXT], http.app[LANES]
    made_s, body = context.cell_summary
    if context.clock() - made_s >= FRESH_S:
        counts = lanes.counts()
        per_s, hot = context.hot.rates(_HOT)
        names = [name for lane in lanes for name in (lane.name, *lane.aliases)]
        adapters = [one.name for lane in lanes for one in lane.conductor.adapters.all()]
        body = orjson.dumps(
            {
                "ready": lanes.ready()[0] and not context.leaving,
                "models": [*names, *lanes.routes, *adapters],
                "num_conductors": lanes.first.conductor.num_others + 1,
                "num_nodes": sum(
                    number
                    for (role, state), number in counts.nodes.items()
                    if role in ROLES and state in _SERVING
                ),
                "num_blocks": counts.num_blocks,
                "num_used_blocks": counts.num_used_blocks,
                "num_requests": context.num_requests,
                "requests_per_s": per_s,
                "hot": hot,
            }
        )
        context.cell_summary = context.clock(), body
    return web.Response(body=body, content_type="application/json")


async def offered(http: web.Request) -> web.Response:
    """``GET /v1/cell/prefixes?moves=1``: hot prefixes of all models, each as ``Offers.made`` tells it."""
    lanes, moves = http.app[LANES], http.query.get("moves") == "1"
    found = [one | {"model": lane.name} for lane in lanes for one in lane.conductor.offers.made(moves=moves)]
    return reply({"prefixes": found})


async def take(http: web.Request) -> web.Response:
    """``POST /v1/cell/prefixes``: read prefixes of another cell. See ``Offers.take``.

    A key that may only read is enough: each offer has the seal of a conductor with the cluster's key.
    """
    body = await read_object(http, http.app[CONTEXT].options.max_body_nbytes)
    model, texts = body.get("model"), body.get("prefixes")
    lane = http.app[LANES].find(model) if isinstance(model, str) else None
    if lane is None or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise bad_request("prefixes: a list of offers of a cell, with the model that they are of", "prefixes")
    try:
        return reply(await lane.conductor.offers.take(texts))
    except EntryRefused as error:
        raise forbidden(f"prefixes: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise bad_request(f"prefixes: no offer of a cell: {error}", "prefixes") from None
