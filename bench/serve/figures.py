"""From answers to figures: percentiles, throughput, goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.server import Outcome
from moonpool.runtime.reports.report import Row


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest. ``values`` must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    # Rounding must not carry it beyond the higher one.
    return min(ordered[high], ordered[low] + (ordered[high] - ordered[low]) * (place - low))


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good. Seconds; 0: not asked for."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def met(self, answer: Answer) -> bool:
        return (not self.ttft_s or answer.ttft_s <= self.ttft_s) and (
            not self.tpot_s or answer.tpot_s <= self.tpot_s
        )


def spread(case: str, metric: str, seconds: Sequence[float]) -> Row:
    """A row in milliseconds: the median, with p50 and p99; p90 has a row of its own (see ``latencies``)."""
    scaled = [1e3 * value for value in seconds]
    middle = median(scaled)
    return Row(case, metric, middle, "ms", p50=middle, p99=percentile(scaled, 99))


def latencies(case: str, metric: str, seconds: Sequence[float]) -> list[Row]:
    return [spread(case, metric, seconds), Row(case, f"{metric} p90", 1e3 * percentile(seconds, 90), "ms")]


def gaps(answer: Answer) -> list[float]:
    """Seconds between the events of one answer."""
    return [later - earlier for earlier, later in pairwise(answer.token_s)]


def output_rate(outcome: Outcome) -> float:
    """Generated tokens a second of wall time, from the first request sent to the last answer's end."""
    return sum(answer.output_tokens for answer in outcome.answers) / outcome.seconds


def load_rows(case: str, outcome: Outcome, slo: Slo) -> list[Row]:
    """Every figure of a run. Failed requests count in ``failed`` and as not good, and nowhere else."""
    answers = [answer for answer in outcome.answers if not answer.error]
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    rows = [
        Row(case, "requests", len(outcome.answers) / outcome.seconds, "requests/s"),
        Row(case, "failed", float(len(outcome.answers) - len(answers)), "requests"),
        Row(case, "output throughput", output_rate(outcome), "tokens/s"),
        Row(case, "total throughput", output_rate(outcome) + prompt_tokens / outcome.seconds, "tokens/s"),
    ]
    if slo.ttft_s or slo.tpot_s:
        good = sum(slo.met(answer) for answer in answers)
        rows.append(Row(case, "goodput", good / outcome.seconds, "requests/s"))
        rows.append(Row(case, "requests within the SLOs", 100 * good / max(1, len(outcome.answers)), "%"))
    if answers:
        rows += latencies(case, "TTFT", [answer.ttft_s for answer in answers])
        rows += latencies(
            case, "TPOT", [answer.tpot_s for answer in answers if answer.output_tokens > 1] or [0.0]
        )
        rows += latencies(case, "E2E", [answer.e2e_s for answer in answers])
        cached = sum(answer.cached_tokens for answer in answers)
        rows.append(Row(case, "prompt tokens from cache", float(cached), "tokens"))
        rows.append(Row(case, "cache hit", 100 * cached / max(1, prompt_tokens), "%"))
    return rows
