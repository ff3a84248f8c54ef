"""Totals of each transfer path over all nodes, from their heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moonpool.kvstore.index.redis.node_record import NodeRecord

_COUNTS = ("nbytes", "seconds", "batches", "failures", "retries", "in_flight")
_MAX_PATHS = 16


def paths_of(records: Iterable[NodeRecord]) -> list[dict[str, Any]]:
    """Totals of each path, with quantiles of a batch's seconds; None: no batch, or beyond the last
    bucket.

    Entries in another form, such as of another version, are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        reported = record.extra.get("paths")
        for name, totals in reported.items() if isinstance(reported, dict) else ():
            if isinstance(totals, dict) and (name in found or len(found) < _MAX_PATHS):
                _add(found.setdefault(name, dict.fromkeys(_COUNTS, 0) | {"buckets": {}}), totals)
    return [_summary(name, totals) for name, totals in sorted(found.items())]


def _add(total: dict[str, Any], reported: Mapping[str, Any]) -> None:
    for name in _COUNTS:
        if isinstance(count := reported.get(name), int | float):
            total[name] += count
    buckets = reported.get("buckets")
    for bound, count in buckets if isinstance(buckets, list) else ():
        if isinstance(bound, int | float) and isinstance(count, int | float):
            total["buckets"][bound] = total["buckets"].get(bound, 0) + count


def _summary(name: str, totals: dict[str, Any]) -> dict[str, Any]:
    buckets = sorted(totals.pop("buckets").items())
    return {
        "path": name,
        **totals,
        **{f"p{q}_s": histogram_quantile(buckets, totals["batches"], q / 100) for q in (50, 90, 95, 99)},
    }


def histogram_quantile(buckets: Sequence[tuple[float, float]], count: float, q: float) -> float | None:
    """The quantile of a cumulative histogram, linear within a bucket, as in Prometheus."""
    below, low = 0.0, 0.0
    for bound, up_to in buckets:
        if count and up_to >= q * count:
            inside = up_to - below
            return low + (bound - low) * ((q * count - below) / inside if inside else 1.0)
        below, low = up_to, bound
    return None
