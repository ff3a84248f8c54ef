"""The record of a running cluster: what benchmarks record of a run, of all requests since the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from moonpool.conductor.observing.transfer_paths import histogram_quantile
from moonpool.runtime.reports.conditions import COLD, WARM, CacheState, Conditions, ModelFacts, load_average
from moonpool.runtime.reports.report import Environment, NodeFacts, Report, Row

_UNKNOWN = "not known: no node says"
# Of the API's metrics: our name, the report's, and the unit of counts.
_LATENCIES = (
    ("time_to_first_token_seconds", "TTFT"),
    ("time_per_output_token_seconds", "TPOT"),
    ("inter_token_latency_seconds", "ITL"),
    ("request_seconds", "E2E"),
)
_COUNTS = (
    ("prompt_tokens", "prompt tokens", "tokens"),
    ("prefix_hit_tokens", "prompt tokens from cache", "tokens"),
    ("output_tokens", "output tokens", "tokens"),
    ("requests_within_slo", "sequences within the SLOs", "sequences"),
    ("running_requests", "running now", "sequences"),
    ("waiting_requests", "waiting now", "sequences"),
)
_FRACTIONS = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Served:
    """A model: its name, ``Conductor.cluster()``, and ``RequestMetrics.snapshot()``, empty before its first
    request."""

    name: str
    cluster: Mapping[str, Any]
    counted: Mapping[str, Any]


def cluster_report(about: Mapping[str, Any], served: Sequence[Served], now_s: float) -> Report:
    """``about``: of the conductor's start. ``now_s``: unix time."""
    nodes = [node for one in served for node in one.cluster["nodes"]]
    blocks = sum(count for one in served for _, count in _blocks(one.cluster))
    held: Counter[str] = Counter()
    for one in served:
        held.update(dict(_held(one.cluster)))
    started = datetime.fromtimestamp(about.get("started_unix_s", now_s), UTC).isoformat(timespec="seconds")
    conditions = Conditions(
        [model for one in served for model in _models(one)],
        CacheState(
            WARM if blocks else COLD,
            held.total(),
            blocks,
            "now, by tier: "
            + (", ".join(f"{name} {tokens:,} tokens" for name, tokens in held.items()) or "none"),
        ),
        f"nothing is left out: all requests since {started}",
        {},
        load=[about.get("load_average", 0.0), load_average()],
    )
    environment = Environment(
        about.get("machine", ""),
        about.get("versions", {}),
        about.get("commit", ""),
        datetime.fromtimestamp(now_s, UTC).isoformat(timespec="seconds"),
        about.get("command", "moonpool.conductor"),
        {one["key"]: str(one["value"]) for one in about.get("options", ())},
        conditions,
        [_node(node) for node in nodes],
    )
    return Report(environment, [row for one in served for row in _rows(one)])


def _models(one: Served) -> Iterable[ModelFacts]:
    """One for each form in which nodes hold the model: while it is replaced, there may be two."""
    kv = one.cluster.get("dtype") or _UNKNOWN
    found = [
        ModelFacts(one.name, node.get("model") or _UNKNOWN, node.get("weights") or _UNKNOWN, kv)
        for node in one.cluster["nodes"]
        if node.get("role") != "store"
    ]
    return dict.fromkeys(found or [ModelFacts(one.name, _UNKNOWN, _UNKNOWN, kv)])


def _node(node: Mapping[str, Any]) -> NodeFacts:
    return NodeFacts(
        str(node.get("node_id", "")),
        str(node.get("role", "")),
        str(node.get("machine") or _UNKNOWN),
        {name: str(version) for name, version in node.get("versions", {}).items()},
    )


def _blocks(cluster: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Cached blocks of each tier of each node. Of a pool those that no sequence uses."""
    for node in cluster["nodes"]:
        for tier in node["tiers"]:
            yield tier["name"], tier.get("num_cached_blocks", tier["num_used_blocks"])


def _held(cluster: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Cached tokens by tier, over all nodes and with copies."""
    totals: dict[str, int] = {}
    for tier, blocks in _blocks(cluster):
        totals[tier] = totals.get(tier, 0) + blocks * (cluster.get("block_size") or 0)
    return list(totals.items())


def _rows(one: Served) -> Iterator[Row]:
    case = f"{one.name}, since the start"
    for reason, count in one.counted.get("requests", {}).items():
        yield Row(case, f"sequences that ended: {reason}", count, "sequences")
    for name, metric, unit in _COUNTS:
        if name in one.counted:
            yield Row(case, metric, one.counted[name], unit)
    for name, metric in _LATENCIES:
        if (row := _latency(case, metric, one.counted.get(name, {}))) is not None:
            yield row
    for tier, tokens in _held(one.cluster):
        yield Row(f"{one.name}, now", f"cached tokens, {tier}", float(tokens), "tokens")


def _latency(case: str, metric: str, histogram: Mapping[str, Any]) -> Row | None:
    """In milliseconds. None: nothing was measured. A percentile beyond the last bucket is left out; the value
    is the median, or the mean where the median is beyond."""
    buckets = [(1e3 * float(bound), count) for bound, count in histogram.get("buckets", ())]
    if not buckets or not (count := buckets[-1][1]):
        return None
    finite = [each for each in buckets if each[0] != float("inf")]
    p50, p90, p95, p99 = (histogram_quantile(finite, count, q) for q in _FRACTIONS)
    middle = 1e3 * histogram["sum"] / count if p50 is None else p50
    return Row(case, metric, middle, "ms", p50=p50, p90=p90, p95=p95, p99=p99)
