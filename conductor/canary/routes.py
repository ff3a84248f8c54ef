"""HTTP routes of canaries. ``{name}`` is the name that clients ask for: a model's, or an alias of it."""

from __future__ import annotations

import re

from aiohttp import web

from moonpool.conductor.api.errors import ApiError
from moonpool.conductor.api.models.lanes import LANES
from moonpool.conductor.api.status_routes import reply
from moonpool.conductor.canary.canaries import MOST_TENANTS, Canaries
from moonpool.conductor.canary.decision import LEAST_REQUESTS
from moonpool.conductor.fleet.errors import FleetUnchanged

MOST_REQUESTS = 1_000_000


async def status(http: web.Request) -> web.Response:
    """``GET /v1/fleet/canary``: the latest one of each name."""
    canaries = http.app[LANES].canaries
    return reply({"object": "list", "data": [] if canaries is None else canaries.status()})


async def start(http: web.Request) -> web.Response:
    """``POST /v1/fleet/canary/{name}/start/{candidate}/{share}?tenant=NAME&…&least=REQUESTS&auto=1``"""
    canaries, lanes, info = _canaries(http), http.app[LANES], http.match_info
    lane, candidate = lanes.named(info["name"]), lanes.named(info["candidate"])
    share = _share(http)
    least, tenants = http.query.get("least", str(LEAST_REQUESTS)), http.query.getall("tenant", [])
    if not re.fullmatch(r"[0-9]{1,9}", least) or not 1 <= int(least) <= MOST_REQUESTS:
        raise ApiError(400, f"least: must be from 1 to {MOST_REQUESTS}, got {least[:32]!r}", param="least")
    if len(tenants) > MOST_TENANTS:
        raise ApiError(400, f"tenant: at most {MOST_TENANTS}, got {len(tenants)}", param="tenant")
    if tenants and not lanes.first.gate.keys.are_configured:
        raise FleetUnchanged(
            "no tenants are configured (conductor.tenants_path): give a share of all requests"
        )
    if not candidate.conductor.serves:
        raise FleetUnchanged(f"{candidate.name} has no node to answer with: start one before")
    auto = http.query.get("auto", "0") == "1"
    slo = lane.conductor.slo
    return reply(
        await canaries.begin(lane.name, candidate.name, share, tenants, slo, auto=auto, least=int(least))
    )


async def change_share(http: web.Request) -> web.Response:
    """``POST /v1/fleet/canary/{name}/share/{share}``"""
    return reply(await _canaries(http).share(_name(http), _share(http)))


async def promote(http: web.Request) -> web.Response:
    """``POST /v1/fleet/canary/{name}/promote``"""
    return reply(await _canaries(http).promote(_name(http)))


async def roll_back(http: web.Request) -> web.Response:
    """``POST /v1/fleet/canary/{name}/rollback``"""
    return reply(await _canaries(http).roll_back(_name(http)))


def _name(http: web.Request) -> str:
    """Of the model. Raises ``ApiError`` 404."""
    return http.app[LANES].named(http.match_info["name"]).name


def _share(http: web.Request) -> float:
    """Raises ``ApiError`` 400."""
    text = http.match_info["share"]
    try:
        return float(text)
    except ValueError:
        raise ApiError(400, f"share: must be a number, got {text[:32]!r}", param="share") from None


def _canaries(http: web.Request) -> Canaries:
    if (canaries := http.app[LANES].canaries) is None:
        raise FleetUnchanged(
            "this conductor serves one model: a canary needs two, the old and the new one (models.toml)"
        )
    return canaries
