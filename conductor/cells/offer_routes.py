"""Hot prefixes between cells: ``/v1/cell/prefixes``. Routers read it in one cell and send it to another."""

from __future__ import annotations

import orjson
from aiohttp import web

from moonpool.conductor.api.context import CONTEXT
from moonpool.conductor.api.errors import bad_request, forbidden
from moonpool.conductor.api.models.lanes import LANES
from moonpool.conductor.api.request_body import read_object
from moonpool.kvstore.errors import EntryRefused


async def offered(http: web.Request) -> web.Response:
    """``GET /v1/cell/prefixes?moves=1``: hot prefixes of all models, each as ``Offers.made`` tells it."""
    lanes, moves = http.app[LANES], http.query.get("moves") == "1"
    found = [one | {"model": lane.name} for lane in lanes for one in lane.conductor.offers.made(moves=moves)]
    return _reply({"prefixes": found})


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
        return _reply(await lane.conductor.offers.take(texts))
    except EntryRefused as error:
        raise forbidden(f"prefixes: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise bad_request(f"prefixes: no offer of a cell: {error}", "prefixes") from None


def _reply(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
