"""An outcome as the rows of a report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.runtime.reports.report import Row
from moonpool.simulator.outcome import Outcome

_TIERS = ("pool", "host", "ssd", "peer")


def rows(case: str, outcome: Outcome) -> list[Row]:
    """Every figure; latencies are over the requests that were served, means with p50 and p99 beside them."""
    completed = outcome.completed
    found = [
        Row(case, "requests", float(len(outcome.served)), "requests"),
        Row(case, "served", float(len(completed)), "requests"),
        Row(case, "served within the SLOs", float(outcome.num_within), "requests"),
        Row(case, "effective request ratio", 100 * outcome.effective_ratio, "%"),
        Row(case, "goodput", outcome.goodput, "requests/s"),
    ]
    for stage, count in sorted(outcome.rejections.items()):
        found.append(Row(case, f"rejected: {stage}", float(count), "requests"))
    if completed:
        found.append(_spread(case, "TTFT", [each.ttft_s for each in completed]))
    several = [each for each in completed if each.output_tokens > 1]
    if several:
        found.append(_spread(case, "TPOT", [each.tpot_s for each in several]))
        found.append(_spread(case, "TBT (longest tenth)", [each.tbt_s for each in several]))
    if completed:
        found.append(_spread(case, "E2E", [each.e2e_s for each in completed]))
    return found + _cache_rows(case, outcome) + _cost_rows(case, outcome)


def _spread(case: str, metric: str, seconds: Sequence[float]) -> Row:
    return Row(
        case,
        metric,
        1e3 * float(np.mean(seconds)),
        "ms, mean",
        p50=1e3 * float(np.median(seconds)),
        p99=1e3 * float(np.quantile(seconds, 0.99)),
    )


def _cache_rows(case: str, outcome: Outcome) -> list[Row]:
    total = sum(outcome.hit_tokens.values())
    found = [Row(case, "cache hit", 100 * outcome.hit_ratio, "% of prompt tokens")]
    for tier in _TIERS:
        tokens = outcome.hit_tokens[tier]
        if tokens:
            found.append(Row(case, f"hit in {tier}", 100 * tokens / total, "% of prompt tokens"))
            found.append(Row(case, f"hit in {tier}, blocks", float(tokens // outcome.block_tokens), "blocks"))
    if outcome.hot_copies:
        copies = float(np.mean(outcome.hot_copies))
        found.append(
            Row(case, f"copies of the {len(outcome.hot_copies)} most shared blocks", copies, "nodes, mean")
        )
    if outcome.num_copies:
        found.append(Row(case, "hot prefixes copied", float(outcome.num_copies), "copies"))
        found.append(Row(case, "let go again", float(outcome.num_released), "copies"))
    return found


def _cost_rows(case: str, outcome: Outcome) -> list[Row]:
    return [
        Row(case, "bytes moved", outcome.moved_nbytes / 1e9, "GB"),
        Row(case, "prefill GPU time", outcome.prefill_busy_s, "GPU s"),
        Row(case, "decode GPU time", outcome.decode_busy_s, "GPU s"),
        Row(case, "GPUs busy", 100 * _busy(outcome), "% of GPU s"),
    ]


def _busy(outcome: Outcome) -> float:
    available_s = outcome.num_gpus * outcome.span_s
    return (outcome.prefill_busy_s + outcome.decode_busy_s) / available_s if available_s else 0.0
