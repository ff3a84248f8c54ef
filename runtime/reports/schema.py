"""Whether a file is what ``moonpool bench … --json`` writes: the shape that
``moonpool.runtime.reports.report`` documents."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.reports.conditions import CACHE_STATES, KINDS

LIMITS = ("at least", "at most")


class ReportInvalid(MoonpoolError):
    """A report does not have the shape. ``where`` names the place, such as ``rows[3].ratio``."""

    failure = FailureClass.REQUEST

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where} {what}")
        self.where = where
        self.what = what


def validate(content: Any, *, complete: bool = False) -> None:
    """Check that ``content``, as parsed from JSON, has the shape that ``moonpool.runtime.reports.report``
    documents. ``complete``: also what older files lack is needed.

    Raises:
        ReportInvalid: naming the first place that is wrong.
    """
    _keys("report", content, {"environment": dict, "rows": list}, {"curves": list})
    environment = content["environment"]
    needed: dict[str, type] = {"machine": str, "versions": dict, "commit": str, "date": str}
    later: dict[str, type] = {"command": str, "options": dict, "conditions": dict}
    _keys("environment", environment, needed | (later if complete else {}), later | {"nodes": list})
    for number, node in enumerate(environment.get("nodes", ())):
        facts = {"name": str, "role": str, "machine": str, "versions": dict}
        _keys(f"environment.nodes[{number}]", node, facts, {})
    for group in ("versions", "options"):
        for name, text in environment.get(group, {}).items():
            _require(isinstance(text, str), f"environment.{group}.{name}", "must be a text")
    try:
        datetime.fromisoformat(environment["date"])
    except ValueError as error:
        raise ReportInvalid("environment.date", f"must be an ISO 8601 date: {error}") from error
    if "conditions" in environment:
        _validate_conditions("environment.conditions", environment["conditions"])
    seen: set[tuple[str, str, str | None]] = set()
    for number, row in enumerate(content["rows"]):
        where = f"rows[{number}]"
        _validate_row(where, row)
        _require(not complete or "peer" not in row or "peer_kind" in row, f"{where}.peer_kind", "is missing")
        name = (row["case"], row["metric"], row.get("peer"))
        _require(name not in seen, where, f"repeats {name[1]!r} of {name[0]!r}")
        seen.add(name)
    for number, curve in enumerate(content.get("curves", ())):
        where = f"curves[{number}]"
        _keys(where, curve, {"panel": str, "name": str, "x": str, "y": str, "points": list}, {})
        for point in curve["points"]:
            _require(isinstance(point, list) and len(point) == 2, f"{where}.points", "must be pairs")
            _keys(f"{where}.points", dict(zip("xy", point, strict=True)), {"x": float, "y": float}, {})


def _validate_conditions(where: str, content: Any) -> None:
    needed = {"models": list, "cache": dict, "warm_up": str, "seeds": dict, "noise": dict}
    _keys(where, content, needed, {})
    for number, model in enumerate(content["models"]):
        place = f"{where}.models[{number}]"
        _keys(place, model, {"name": str, "revision": str, "weights": str, "kv": str}, {})
        for name, text in model.items():
            _require(bool(text), f"{place}.{name}", "must not be empty")
    cache = content["cache"]
    _keys(f"{where}.cache", cache, {"state": str, "tokens": int, "blocks": int, "note": str}, {})
    states = ", ".join(CACHE_STATES)
    _require(cache["state"] in CACHE_STATES, f"{where}.cache.state", f"must be one of {states}")
    _require(bool(content["warm_up"]), f"{where}.warm_up", "must say what ran before, or that nothing did")
    for name, seed in content["seeds"].items():
        _require(isinstance(seed, int), f"{where}.seeds.{name}", "must be a whole number")
    _keys(f"{where}.noise", content["noise"], {"rounds": int, "load": list}, {"spread": float})
    _require(len(content["noise"]["load"]) == 2, f"{where}.noise.load", "must be at the start and the end")
    for load in content["noise"]["load"]:
        _number(f"{where}.noise.load", load)


def _validate_row(where: str, row: Any) -> None:
    needed = {"case": str, "metric": str, "value": float, "unit": str}
    optional = {"p50": float, "p90": float, "p95": float, "p99": float, "samples": list}
    optional |= {"limit": str, "limit_value": float, "ratio": float, "peer": str, "peer_value": float}
    optional |= {"noise": float, "peer_kind": str}
    _keys(where, row, needed, optional)
    for sample in row.get("samples", ()):
        _number(f"{where}.samples", sample)
    _require(row.get("samples") != [], f"{where}.samples", "must not be empty")
    for one, other in (("limit", "limit_value"), ("peer", "peer_value")):
        _require((one in row) == (other in row), where, f"must have both {one} and {other}, or neither")
    for name in ("ratio", "peer_kind"):
        _require(name not in row or "peer" in row, f"{where}.{name}", "needs a peer")
    kinds = ", ".join(KINDS)
    _require(row.get("peer_kind", KINDS[0]) in KINDS, f"{where}.peer_kind", f"must be one of {kinds}")
    _require(row.get("limit", LIMITS[0]) in LIMITS, f"{where}.limit", f"must be one of {', '.join(LIMITS)}")


def _keys(where: str, content: Any, needed: Mapping[str, type], optional: Mapping[str, type]) -> None:
    _require(isinstance(content, dict), where, "must be an object")
    for key in needed:
        _require(key in content, f"{where}.{key}", "is missing")
    known = {**needed, **optional}
    for key, value in content.items():
        place = f"{where}.{key}"
        _require(key in known, place, f"is unknown; known are {', '.join(known)}")
        if known[key] is float:
            _number(place, value)
        else:
            _require(isinstance(value, known[key]), place, f"must be a {known[key].__name__}")


def _number(where: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared rather than asked with isfinite, which has no answer for whole numbers beyond a float.
    finite = number and abs(value) <= sys.float_info.max
    _require(finite, where, f"must be a finite number, got {value!r}")


def _require(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise ReportInvalid(where, what)
