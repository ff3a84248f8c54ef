"""What a conductor tells routers of its cell: ``GET /v1/cell``."""

from __future__ import annotations

from typing import Final

import orjson
from aiohttp import web

from moonpool.conductor.api.context import CONTEXT
from moonpool.conductor.api.models.lanes import LANES
from moonpool.kvstore.index.redis.node_record import STAGES

FRESH_S: Final = 0.5
"""How long an answer is given again: routers may be many."""
_HOT: Final = 64  # those with less than some percent of a cell's requests do not matter
_SERVING: Final = ("ready", "unhealthy")  # states of nodes that take requests
_COMPUTING: Final = (*STAGES, "both")


async def cell(http: web.Request) -> web.Response:
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
                    if role in _COMPUTING and state in _SERVING
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
