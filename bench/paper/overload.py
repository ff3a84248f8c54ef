"""Rejection under overload, arXiv report: the requests that each policy rejects and serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from moonpool.bench.paper.setup import PAPER, scenario
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.trace import TraceRequest, at_speed
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

_SPEED = 2.0
_NODES = 8
# Decode steps are slowed by this factor: otherwise eight decode nodes never fill, and reject nothing.
_DECODE_SLOWDOWN = 4.0

TERMS = f"""\
Requests rejected, and served within TTFT 30 s and TBT 100 ms, of the trace at {_SPEED:g}× its speed;
{_NODES} prefill and {_NODES} decode nodes, kv-aware placement, decode steps
{_DECODE_SLOWDOWN:g}× the formula of the shipped node, so that decode limits too. The paper's counts (arXiv,
version 3) are of 23,000 requests of another trace at twice its speed, so fractions are compared.
"""
_PAPER_REQUESTS = 23_000
# In the paper's order: each policy rejects fewer requests than the one before.
PAPER_REJECTED = {"baseline": 4183, "early": 3771, "predicted": 3589}


def measure(requests: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Return rows of each policy beside the paper's, then two rows on the order of the policies."""
    found: dict[str, Outcome] = {}
    rows: list[Row] = []
    for rejection, paper in PAPER_REJECTED.items():
        say(rejection)
        outcome = found[rejection] = _run(at_speed(requests, _SPEED), rejection)
        percentage = 100 * outcome.rejections.total() / len(requests)
        row = Row(rejection, "rejected", percentage, "% of requests")
        rows.append(versus(row, PAPER, 100 * paper / _PAPER_REQUESTS))
        for stage, count in sorted(outcome.rejections.items()):
            rows.append(Row(rejection, f"rejected: {stage}", float(count), "requests"))
        rows.append(Row(rejection, "served within the SLOs", float(outcome.num_within), "requests"))
        rows.append(Row(rejection, "prefill GPU time", outcome.prefill_busy_s, "GPU s"))
    orders = {
        "ever fewer rejected": [-outcome.rejections.total() for outcome in found.values()],
        "ever more within": [outcome.num_within for outcome in found.values()],
    }
    for metric, values in orders.items():
        rises = float(all(a < b for a, b in pairwise(values)))
        case = ", ".join(PAPER_REJECTED)
        rows.append(Row(case, metric, rises, "1: yes", limit="at least", limit_value=1.0))
    return rows


def _run(requests: Sequence[TraceRequest], rejection: str) -> Outcome:
    plain = scenario("kv-aware", prefill=_NODES, decode=_NODES)
    assert plain.decode_hardware is not None
    slowed = plain.decode_hardware.scaled(decode=_DECODE_SLOWDOWN)
    return Simulation(replace(plain, rejection=rejection, decode_hardware=slowed), requests).run()
