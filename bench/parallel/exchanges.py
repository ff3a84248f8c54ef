"""What ranks exchange in a step or a prompt: how often, how much, and how long it takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from moonpool.engine.ranks.leader import StepTimes
from moonpool.runtime.reports.report import Row


def quantile_row(case: str, metric: str, samples_s: Sequence[float]) -> Row:
    """Of durations, in microseconds."""
    p50, p95, p99 = (1e6 * np.quantile(samples_s, (0.5, 0.95, 0.99))).tolist()
    return Row(case, metric, p50, "µs", p50=p50, p95=p95, p99=p99)


def exchange_rows(
    case: str, samples_s: Sequence[float], times: Sequence[StepTimes], num: int, of: str, num_tokens: int
) -> list[Row]:
    """Of rank 0. times: of ``num`` steps, or prompts (``of``), each of ``num_tokens`` tokens; samples_s: of
    all their exchanges, or the last of them."""
    count = sum(step.num_exchanges for step in times) / num
    nbytes = sum(step.exchanged_nbytes for step in times) / num
    rows = [
        Row(case, "exchanges", count, f"a {of}"),
        Row(case, "exchanged by rank 0", nbytes, f"bytes/{of}"),
        Row(case, "exchanged by rank 0, by token", nbytes / num_tokens, "bytes/token"),
    ]
    if samples_s:
        took_s = count * statistics.mean(samples_s)
        rows += [
            quantile_row(case, "an exchange", samples_s),
            Row(case, "exchanges, seconds", took_s, f"s/{of}"),
        ]
    return rows


def share_rows(case: str, times: Sequence[StepTimes]) -> list[Row]:
    """Of all the steps' time: what the busiest rank computed, the one longest in exchanges exchanged, and the
    one that waited longest for the stage before waited."""
    total_s = sum(step.step_s for step in times)
    most = {
        "computing, busiest rank": [step.compute_s for step in times],
        "exchanging, most": [step.collective_s for step in times],
        "bubble, most": [step.bubble_s for step in times],
    }
    return [
        Row(case, name, max(map(sum, zip(*of_steps, strict=True))) / total_s, "of the step")
        for name, of_steps in most.items()
    ]
