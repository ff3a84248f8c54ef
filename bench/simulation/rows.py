"""A simulation's outcome as rows and curves of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from moonpool.bench.harness.turns import percentiles
from moonpool.runtime.reports.report import Curve, Row
from moonpool.simulator.outcome import Outcome, Served

_CURVE_POINTS = 200
# The latencies of a served request; those of gaps need two tokens.
_TTFT = "TTFT"
_TBT = "TBT (longest tenth)"
_LATENCIES: Mapping[str, Callable[[Served], float]] = {
    _TTFT: lambda each: each.ttft_s,
    "TPOT": lambda each: each.tpot_s,
    _TBT: lambda each: each.tbt_s,
    "E2E": lambda each: each.e2e_s,
}


def rows(case: str, outcome: Outcome) -> list[Row]:
    """Return every figure. Latencies are means over the served requests, with p50 and p99."""
    figures: list[tuple[str, float, str]] = [
        ("requests", len(outcome.served), "requests"),
        ("served", len(outcome.completed), "requests"),
        ("served within the SLOs", outcome.num_within, "requests"),
        ("effective request ratio", 100 * outcome.effective_ratio, "%"),
        ("goodput", outcome.goodput, "requests/s"),
        *((f"rejected: {stage}", count, "requests") for stage, count in sorted(outcome.rejections.items())),
        ("cache hit", 100 * outcome.hit_ratio, "% of prompt tokens"),
    ]
    total = sum(outcome.hit_tokens.values())
    for tier in ("pool", "host", "ssd", "peer"):
        if tokens := outcome.hit_tokens[tier]:
            figures.append((f"hit in {tier}", 100 * tokens / total, "% of prompt tokens"))
            figures.append((f"hit in {tier}, blocks", tokens // outcome.block_tokens, "blocks"))
    if copies := outcome.hot_copies:
        figures.append(
            (f"copies of the {len(copies)} most shared blocks", float(np.mean(copies)), "nodes, mean")
        )
    if outcome.num_copies:
        figures.append(("hot prefixes copied", outcome.num_copies, "copies"))
        figures.append(("released", outcome.num_released, "copies"))
    figures += [
        ("bytes moved", outcome.moved_nbytes / 1e9, "GB"),
        ("prefill GPU time", outcome.prefill_busy_s, "GPU s"),
        ("decode GPU time", outcome.decode_busy_s, "GPU s"),
        ("GPUs busy", 100 * outcome.busy_ratio, "% of GPU s"),
    ]
    found = [Row(case, metric, float(value), unit) for metric, value, unit in figures]
    found += [*_class_rows(case, outcome), *_tenant_rows(case, outcome)]
    for metric, latency_s in _LATENCIES.items():
        if values := _values(outcome, metric, latency_s):
            mean_ms = 1e3 * float(np.mean(values))
            found.append(Row(case, metric, mean_ms, "ms, mean", **percentiles(values, 1e3)))
    return found


def _class_rows(case: str, outcome: Outcome) -> list[Row]:
    """Where requests have SLOs of their own: the fraction within, for each SLO."""
    classes = Counter(each.slo or outcome.slo for each in outcome.served)
    if len(classes) < 2:
        return []
    within = Counter(each.slo or outcome.slo for each in outcome.served if each.within(outcome.slo))
    return [
        Row(
            case,
            f"within TTFT {slo.ttft_s:g} s, TBT {slo.tbt_s:g} s",
            100 * within[slo] / count,
            f"% of {count} requests",
        )
        for slo, count in sorted(classes.items(), key=lambda item: (item[0].ttft_s, item[0].tbt_s))
    ]


def _tenant_rows(case: str, outcome: Outcome) -> Iterator[Row]:
    """Where requests have tenants: the fraction within the SLOs and the time to first token of each."""
    for name in sorted({each.tenant for each in outcome.served} - {""}):
        own = [each for each in outcome.served if each.tenant == name]
        within = sum(each.within(outcome.slo) for each in own)
        yield Row(
            case, f"tenant {name} within the SLOs", 100 * within / len(own), f"% of {len(own)} requests"
        )
        if limited := sum(each.rejected == "limit" for each in own):
            yield Row(case, f"tenant {name} over its limits", float(limited), "requests")
        if ttfts_s := [each.ttft_s for each in own if not each.rejected]:
            mean_ms = 1e3 * float(np.mean(ttfts_s))
            yield Row(case, f"tenant {name} TTFT", mean_ms, "ms, mean", **percentiles(ttfts_s, 1e3))


def _values(outcome: Outcome, metric: str, latency_s: Callable[[Served], float]) -> list[float]:
    least_tokens = 1 if metric in (_TTFT, "E2E") else 2
    return [latency_s(each) for each in outcome.completed if each.output_tokens >= least_tokens]


def curves(outcomes: Mapping[str, Outcome]) -> list[Curve]:
    """Return the distributions of TTFT and TBT: a line for each outcome. Rejected requests never arrive."""
    found: list[Curve] = []
    for metric in (_TTFT, _TBT):
        for case, outcome in outcomes.items():
            values = np.sort(_values(outcome, metric, _LATENCIES[metric]))
            ranks = np.linspace(0, len(values) - 1, min(len(values), _CURVE_POINTS)).astype(int)
            points = [(float(values[rank]), float(rank + 1) / len(outcome.served)) for rank in ranks]
            found.append(Curve(metric, case, "s", "fraction of requests", points))
    return found
