"""HTTP routes that show and change the fleet.

What is changed is in the path, because an operator's token proves the method and the path of a call. Where
a cluster has several models, ``?model=NAME`` names one; nodes are found by their own names.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from moonpool.conductor.api.errors import ApiError
from moonpool.conductor.api.models.lanes import LANES, Lanes
from moonpool.conductor.api.status_routes import reply
from moonpool.conductor.core import Conductor
from moonpool.conductor.fleet.administration import MAX_NODES
from moonpool.conductor.fleet.errors import NodeMissing
from moonpool.runtime.cancellation import outlast

log = logging.getLogger(__name__)

WATCH_S = 5.0
MOST_WATCH_S = 3600.0


async def listed(http: web.Request) -> web.Response:
    """``GET /v1/fleet``"""
    conductor = _conductor(http)
    return reply(await conductor.fleet.listed() | {"planner": conductor.planner()})


async def scale(http: web.Request) -> web.Response:
    """``POST /v1/fleet/scale/{role}/{count}``"""
    text = http.match_info["count"]
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_NODES:
        raise ApiError(400, f"count: must be from 1 to {MAX_NODES}, got {text[:32]!r}", param="count")
    return reply(await _completed(_conductor(http).fleet.scale(http.match_info["role"], int(text))))


async def switch(http: web.Request) -> web.Response:
    """``POST /v1/fleet/switch/{node}/{role}``"""
    info = http.match_info
    conductor = http.app[LANES].of_node(info["node"])
    return reply(await _completed(conductor.fleet.switch_role(info["node"], info["role"])))


async def switch_model(http: web.Request) -> web.Response:
    """``POST /v1/fleet/switch/{node}/model/{name}``: answers when the node was told."""
    lanes, info = http.app[LANES], http.match_info
    target = lanes.named(info["name"])
    fleet = lanes.of_node(info["node"]).fleet
    return reply(await _completed(fleet.switch_model(info["node"], target.conductor.fleet)))


async def rollout(http: web.Request) -> web.Response:
    """``POST /v1/fleet/rollout?set=SECTION.KEY=VALUE&…&watch_s=SECONDS``: answers when it has begun."""
    text = http.query.get("watch_s", str(WATCH_S))
    try:
        watch_s = float(text)
    except ValueError:
        watch_s = -1.0
    if not 0 <= watch_s <= MOST_WATCH_S:
        raise ApiError(
            400, f"watch_s: must be from 0 to {MOST_WATCH_S:g}, got {text[:32]!r}", param="watch_s"
        )
    return reply(await _completed(_conductor(http).rollouts.begin(http.query.getall("set", []), watch_s)))


async def rollout_status(http: web.Request) -> web.Response:
    """``GET /v1/fleet/rollout``: the latest one of the cluster."""
    return reply(await _conductor(http).rollouts.status())


async def abort_rollout(http: web.Request) -> web.Response:
    """``POST /v1/fleet/rollout/abort``: roll it back; answers at once."""
    return reply(await _conductor(http).rollouts.abort())


async def drain(http: web.Request) -> web.Response:
    """``POST /v1/fleet/drain/{node}``: answers when the node was told, not when it has ended."""
    return reply(await _completed(_drained(http.app[LANES], http.match_info["node"])))


async def _drained(lanes: Lanes, node: str) -> dict[str, Any]:
    missing: NodeMissing | None = None
    # One that starts is known to the provider of its model alone.
    for conductor in (lanes.of_node(node), *(lane.conductor for lane in lanes)):
        try:
            return await conductor.fleet.drain(node)
        except NodeMissing as error:
            missing = missing or error
    assert missing is not None
    raise missing


async def _completed(change: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Make a change to its end, also when its caller disconnects."""
    work = asyncio.ensure_future(change)
    try:
        return await outlast(work)
    except asyncio.CancelledError:
        if work.done() and not work.cancelled() and (error := work.exception()) is not None:
            log.warning("a change of the fleet failed after its caller had disconnected: %s", error)
        raise


def _conductor(http: web.Request) -> Conductor:
    """Of the model that is named, else of the first one. Raises ``ApiError`` 404."""
    return http.app[LANES].named(http.query.get("model")).conductor
