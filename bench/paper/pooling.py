"""Figure 10 of FAST'25: caches that each node keeps to itself, against one that all share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.bench.paper.setup import PAPER, scenario
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.simulation import Simulation

TERMS = """\
Prompt tokens found in a cache, of all prompt tokens of the trace; 10 prefill nodes of 3 M tokens of
cache, timed, prefills calibrated as for fig5. Shared: kv-aware, which reads prefixes from other nodes. To
itself: what a node finds in its own cache when requests are spread by load alone (least-loaded), and when
they are placed by cache too (local-cache). The paper does not say which of these two its local caches
are. Its figures, of the conversation trace, are read off a plot.
"""
_NODES = 10
_PAPER = {"least-loaded": 0.17, "local-cache": 0.17, "kv-aware": 0.375}
_NAMES = {
    "least-loaded": "each node's own, placed by load",
    "local-cache": "each node's own, placed by cache",
    "kv-aware": "shared",
}


def measure(requests: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for policy, paper in _PAPER.items():
        say(policy)
        outcome = Simulation(scenario(policy, prefill=_NODES, decode=_NODES), requests).run()
        case = _NAMES[policy]
        rows.append(versus(Row(case, "hit ratio", outcome.hit_ratio, "of input tokens"), PAPER, paper))
        rows.append(Row(case, "prefill GPU time", outcome.prefill_busy_s, "GPU s"))
        rows.append(Row(case, "mean TTFT", outcome.mean_ttft_s, "s"))
    return rows
