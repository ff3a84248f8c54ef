"""The page of usage: by tenant, model and day, and how long nodes were there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from typing import Any

from aiohttp import web

from moonpool.conductor.access.gate import PRINCIPAL
from moonpool.conductor.access.roles import INFERENCE
from moonpool.conductor.accounts.ledger import KEEP_DAYS, DayUsage, days_back
from moonpool.conductor.accounts.node_totals import NodeTotals
from moonpool.conductor.accounts.spent import USEFUL, WASTES
from moonpool.conductor.api.errors import bad_request
from moonpool.conductor.api.models.lanes import LANES
from moonpool.conductor.api.status_routes import reply

NOT_AVAILABLE = "not available"


async def usage(http: web.Request) -> web.Response:
    """``GET /v1/usage?day=YYYY-MM-DD&days=N``: the last N days up to one, by default today (UTC).

    A key of a tenant sees its own usage. ``nodes`` is for keys that see the whole cluster.
    """
    principal, last, count = http[PRINCIPAL], _day(http), _count(http)
    whole = principal.scope is None and principal.role != INFERENCE
    tenants, nodes = [], []
    for lane in http.app[LANES]:
        conductor = lane.conductor
        for day in await conductor.ledger.read(days_back(last, count), principal.scope):
            tenants += tenant_rows(day, lane.name, conductor.price)
            if whole and day.nodes:
                nodes.append(nodes_row(day, lane.name, conductor.price))
    return reply({"object": "list", "data": tenants} | ({"nodes": nodes} if whole else {}))


def tenant_rows(usage: DayUsage, model: str, price: float) -> list[dict[str, Any]]:
    """A row for each tenant of a day. ``price``: of a second of a node."""
    rows = []
    for tenant, sums in sorted(usage.tenants.items()):
        seconds = sums["prefill_s"] + sums["decode_s"]
        rows.append(
            {
                "day": usage.day,
                "model": model,
                "tenant": tenant,
                "requests": round(sums["requests"]),
                "prompt_tokens": round(sums["prompt_tokens"]),
                "output_tokens": round(sums["output_tokens"]),
                "seconds": {
                    "prefill": sums["prefill_s"],
                    "decode": sums["decode_s"],
                    "useful": sums[USEFUL],
                    "wasted": _wasted(sums),
                },
                "price_per_node_second": price,
                "cost": price * seconds,
                "tokens_per_unit": _each(sums["output_tokens"], price * seconds),
            }
        )
    return rows


def nodes_row(usage: DayUsage, model: str, price: float) -> dict[str, Any]:
    """The nodes of a model on one day: useful, wasted, idle and unsettled seconds sum to the wall's.

    ``unsettled``: of requests that run, or were lost with a conductor."""
    totals, sums = list(usage.nodes.values()), Counter[str]()
    for tenant in usage.tenants.values():
        sums.update(tenant)
    wall_s = sum(node.wall_s for node in totals)
    busy_s = sum(node.busy_s for node in totals)
    untold_s = sum(max(node.busy_s - node.told_s, 0.0) for node in totals)
    wasted = _wasted(sums)
    if untold_s > 0:
        wasted["abandoned"] = wasted.get("abandoned", 0.0) + untold_s
    return {
        "day": usage.day,
        "model": model,
        "starts": len(totals),
        "seconds": {
            "wall": wall_s,
            "useful": sums[USEFUL],
            "wasted": wasted,
            "idle": wall_s - busy_s,
            "unsettled": busy_s - untold_s - sums["prefill_s"] - sums["decode_s"],
        },
        "price_per_node_second": price,
        "cost": price * wall_s,
        "tokens_per_unit": _each(sums["output_tokens"], price * wall_s),
        "joules": {"gpus": _joules(node.gpu_joules for node in totals), "processors": _of_machines(totals)},
    }


def _wasted(sums: Mapping[str, float]) -> dict[str, float]:
    return {cause: sums[cause] for cause in WASTES if sums.get(cause, 0.0) > 0}


def _each(count: float, cost: float) -> float | None:
    """None: it cost nothing that is known."""
    return count / cost if cost > 0 else None


def _joules(found: Iterable[float | None]) -> float | str:
    known = [joules for joules in found if joules is not None]
    return sum(known) if known else NOT_AVAILABLE


def _of_machines(totals: Iterable[NodeTotals]) -> float | str:
    """Each machine once: its nodes all tell its processors' energy, each since its own start."""
    machines: dict[str, float] = {}
    for node in totals:
        if (joules := node.processor_joules) is not None:
            machines[node.host] = max(machines.get(node.host, 0.0), joules)
    return _joules(machines.values())


def _day(http: web.Request) -> date:
    text = http.query.get("day", "")
    try:
        return date.fromisoformat(text) if text else datetime.now(UTC).date()
    except ValueError:
        raise bad_request(f"day: must be YYYY-MM-DD, got {text[:32]!r}", "day") from None


def _count(http: web.Request) -> int:
    text = http.query.get("days", "1")
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= KEEP_DAYS:
        raise bad_request(f"days: must be from 1 to {KEEP_DAYS}, got {text[:32]!r}", "days")
    return int(text)
