"""Rejection under overload, arXiv report: the requests that each policy rejects and serves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from moonpool.bench.paper.setup import PAPER, holds, scenario
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest, at_speed
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

_SPEED = 2.0
_NODES = 8
# Decode steps are slowed by this factor: otherwise eight decode nodes never fill, and reject nothing.
_DECODE_SLOWDOWN = 4.0

# A load that meets the report's assumptions: prefill is scarce, prefills of rejected requests are of no use,
# and the length of a prompt tells that of its output. Prompt and output of the two kinds of requests:
_SHORT, _LONG = (2_000, 300), (60_000, 3_000)
_LONG_PART, _RATE, _COUNT = 0.09, 2.2, 1500
_FEW, _POOL_TOKENS = 2, 135_000

TERMS = f"""\
Requests rejected, and served within TTFT 30 s and TBT 100 ms, of the trace at {_SPEED:g}× its speed;
{_NODES} prefill and {_NODES} decode nodes, kv-aware placement, decode steps {_DECODE_SLOWDOWN:g}× the
formula of the shipped node, so that decode limits too. The paper's counts (arXiv, version 3) are of 23,000
requests of another trace at twice its speed, so fractions are compared. Generated: {_COUNT:,} requests,
{_RATE:g} a second, {_FEW} + {_FEW} nodes, decode pools of {_POOL_TOKENS:,} tokens; {_LONG_PART:.0%} have
prompts of 60,000 and outputs of 3,000 tokens, the others 2,000 and 300; no shared prefixes.
"""
_PAPER_REQUESTS = 23_000
# In the paper's order: each policy rejects fewer requests than the one before.
PAPER_REJECTED = {"baseline": 4183, "early": 3771, "predicted": 3589}


def measure(requests: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Return rows of each policy beside the paper's, then those of the generated load."""
    plain = scenario("kv-aware", prefill=_NODES, decode=_NODES)
    assert plain.decode_hardware is not None
    slowed = plain.decode_hardware.scaled(decode=_DECODE_SLOWDOWN)
    trace = _run(replace(plain, decode_hardware=slowed), at_speed(requests, _SPEED), say)
    paper = {name: 100 * count / _PAPER_REQUESTS for name, count in PAPER_REJECTED.items()}
    rows = [
        versus(row, PAPER, paper[row.case]) if row.metric == "rejected" else row for row in _rows(trace, "")
    ]
    return rows + generated(say)


def generated(say: Callable[[str], None]) -> list[Row]:
    """Return rows of each policy on the generated load, and their order."""
    small = scenario("kv-aware", prefill=_FEW, decode=_FEW)
    full = replace(small.hardware, pool_tokens=_POOL_TOKENS)
    return _rows(_run(replace(small, decode_hardware=full), scarce(), say), "generated: ")


def scarce() -> list[TraceRequest]:
    """Return a load in which a wasted prefill is dear, and can be foreseen."""
    rng, at_s = random.Random(1), 0.0
    found: list[TraceRequest] = []
    for _ in range(_COUNT):
        at_s += rng.expovariate(_RATE)
        found.append(TraceRequest(at_s, *(_LONG if rng.random() < _LONG_PART else _SHORT), ()))
    return found


def _run(plain: Scenario, requests: Sequence[TraceRequest], say: Callable[[str], None]) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for rejection in PAPER_REJECTED:
        say(f"{rejection}: {len(requests):,} requests")
        found[rejection] = Simulation(replace(plain, rejection=rejection), requests).run()
    return found


def _rows(found: dict[str, Outcome], load: str) -> list[Row]:
    rows: list[Row] = []
    for rejection, outcome in found.items():
        case = f"{load}{rejection}"
        percentage = 100 * outcome.rejections.total() / len(outcome.served)
        rows.append(Row(case, "rejected", percentage, "% of requests"))
        for stage, count in sorted(outcome.rejections.items()):
            rows.append(Row(case, f"rejected: {stage}", float(count), "requests"))
        rows.append(Row(case, "served within the SLOs", float(outcome.num_within), "requests"))
        rows.append(Row(case, "prefill GPU time", outcome.prefill_busy_s, "GPU s"))
    orders = {
        "ever fewer rejected": [-outcome.rejections.total() for outcome in found.values()],
        "ever more within": [outcome.num_within for outcome in found.values()],
    }
    for metric, values in orders.items():
        rises = all(a < b for a, b in pairwise(values))
        rows.append(holds(load + ", ".join(PAPER_REJECTED), metric, rises))
    return rows
