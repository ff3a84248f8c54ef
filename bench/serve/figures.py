"""From answers to figures: latencies, throughput, goodput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.bench.harness.turns import spread
from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.server import Outcome
from moonpool.conductor.costs.model import ERRORS_KEPT
from moonpool.runtime.reports.report import Row


@dataclass(frozen=True, slots=True)
class Slo:
    """The bounds of a good request, in seconds; 0: none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def met(self, answer: Answer) -> bool:
        return (not self.ttft_s or answer.ttft_s <= self.ttft_s) and (
            not self.tpot_s or answer.tpot_s <= self.tpot_s
        )


def output_rate(outcome: Outcome) -> float:
    """Generated tokens per second, from the first request sent to the end of the last answer."""
    return sum(answer.output_tokens for answer in outcome.answers) / outcome.seconds


def load_rows(case: str, outcome: Outcome, slo: Slo) -> list[Row]:
    """Every figure of a run. Failed requests count in ``failed`` and as not good, and in no other row."""
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
        rows.append(spread(case, "TTFT", [answer.ttft_s for answer in answers], "ms", 1e3))
        tpots = [answer.tpot_s for answer in answers if answer.output_tokens > 1]
        rows.append(spread(case, "TPOT", tpots or [0.0], "ms", 1e3))
        rows.append(spread(case, "E2E", [answer.e2e_s for answer in answers], "ms", 1e3))
        cached = sum(answer.cached_tokens for answer in answers)
        rows.append(Row(case, "prompt tokens from cache", float(cached), "tokens"))
        rows.append(Row(case, "cache hit", 100 * cached / max(1, prompt_tokens), "%"))
    return rows


def prediction_rows(case: str, cluster: Mapping[str, Any]) -> list[Row]:
    """Errors of the conductor's estimates, of its latest requests. ``cluster``: its ``/v1/cluster``."""
    found: list[Row] = []
    for name, errors in cluster.get("prediction_errors", {}).items():
        for quantile in ("p50", "p90"):
            if (percent := errors[f"{quantile}_percent"]) is not None:
                unit = f"% of the measured, latest {min(errors['count'], ERRORS_KEPT)}"
                found.append(Row(case, f"error of the predicted {name}, {quantile}", percent, unit))
    return found
