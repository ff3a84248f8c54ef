"""Overload, arXiv report: whom rejection policies turn away, and what is served in the end."""

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
# How much slower decode steps are taken to be than the shipped node's formula says: at that formula eight
# decode nodes never fill at this load, and there would be nothing to reject there.
_DECODE_SLOWER = 4.0

TERMS = f"""\
Requests rejected, and served within TTFT 30 s and TBT 100 ms, of the trace at {_SPEED:g}× its speed;
{_NODES} prefill and {_NODES} decode nodes, kv-aware placement, prefills calibrated as for fig5, decode steps
{_DECODE_SLOWER:g}× the formula of the shipped node, so that decode limits too. The paper's counts (arXiv,
version 3) are of 23,000 requests of another trace at twice its speed, so shares are compared.
"""
_PAPER_REQUESTS = 23_000
# In the order in which they should do ever better.
PAPER_REJECTED = {"baseline": 4183, "early": 3771, "predicted": 3589}


def measure(requests: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Rows of each policy, the paper's share of rejected ones beside ours, then whether they are in order."""
    found: dict[str, Outcome] = {}
    rows: list[Row] = []
    for rejection, paper in PAPER_REJECTED.items():
        say(rejection)
        outcome = found[rejection] = _run(at_speed(requests, _SPEED), rejection)
        rejected = outcome.rejections.total()
        share = Row(rejection, "rejected", 100 * rejected / len(requests), "% of requests")
        rows.append(versus(share, PAPER, 100 * paper / _PAPER_REQUESTS))
        for stage, count in sorted(outcome.rejections.items()):
            rows.append(Row(rejection, f"rejected: {stage}", float(count), "requests"))
        rows.append(Row(rejection, "served within the SLOs", float(outcome.num_within), "requests"))
        rows.append(Row(rejection, "prefill GPU time", outcome.prefill_busy_s, "GPU s"))
    fewer = all(a.rejections.total() > b.rejections.total() for a, b in pairwise(found.values()))
    more = all(a.num_within < b.num_within for a, b in pairwise(found.values()))
    case = "baseline, early, predicted"
    rows.append(Row(case, "ever fewer rejected", float(fewer), "1: yes", limit="at least", limit_value=1.0))
    rows.append(Row(case, "ever more within", float(more), "1: yes", limit="at least", limit_value=1.0))
    return rows


def _run(requests: Sequence[TraceRequest], rejection: str) -> Outcome:
    plain = scenario("kv-aware", prefill=_NODES, decode=_NODES)
    decode = plain.decode_hardware
    assert decode is not None
    scene = replace(plain, rejection=rejection, decode_hardware=decode.scaled(decode=_DECODE_SLOWER))
    return Simulation(scene, requests).run()
