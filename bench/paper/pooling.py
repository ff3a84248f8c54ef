"""Figure 10 of FAST'25: a cache for each node, against one shared cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.bench.paper.setup import PAPER, scenario
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.simulation import Simulation

TERMS = """\
Prompt tokens found in a cache, of all prompt tokens of the trace; 10 prefill nodes with a cache of 3 M
tokens, timed. Shared: kv-aware, which reads prefixes from other nodes. Own: a node uses its own cache
alone, with placement by load (least-loaded) or by cache too (local-cache). The paper does not say which of
the two its local caches are. Its values are read off a plot.
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
