"""Llumnix (OSDI'24): the tails of latencies with and without moves of running requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moonpool.bench.migrate.simulated import WORK, run_both
from moonpool.bench.migrate.tail_latency import MOVES, STAYS
from moonpool.bench.paper.setup import PAPER
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.trace import TraceRequest

# By how many times moves shorten the 99th percentile, at most, over the paper's workloads.
_GAINS = {"TTFT": 15.0, "TPOT": 2.0}

TERMS = """\
The cluster and the load of `moonpool bench migrate --part simulated`: LLaMA3-70B, 8 prefill and 4 decode
nodes of four A800, 4,000 requests in bursts with prompts and outputs of very different lengths. The paper
has 16 instances of LLaMA-7B on one A10 each, colocated; its gains are the highest of its workloads, over
INFaaS++. Where prompts wait for room on an instance that decodes, a move shortens TTFT; here they wait for
prefill nodes.
"""


def workload() -> list[TraceRequest]:
    return WORK.requests()


def measure(trace: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Return the 99th percentiles of both forms, and the gains beside the paper's."""
    outcomes, _ = run_both(trace, say)
    tails = {
        name: {
            "TTFT": float(np.quantile([each.ttft_s for each in outcome.completed], 0.99)),
            "TPOT": float(np.quantile([each.tpot_s for each in outcome.completed], 0.99)),
        }
        for name, outcome in outcomes.items()
    }
    rows = [
        Row(name, f"{metric}, p99", 1e3 * seconds, "ms")
        for name, found in tails.items()
        for metric, seconds in found.items()
    ]
    for metric, paper in _GAINS.items():
        gain = tails[STAYS][metric] / tails[MOVES][metric]
        rows.append(versus(Row("gain by moves", f"{metric}, p99", gain, "×"), PAPER, paper))
    return rows
