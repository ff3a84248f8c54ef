"""Figures 9 and 10 of FAST'25: the hit ratio of a cache by its size, and of one for each node or for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.bench.eviction.replay import insert
from moonpool.bench.paper.setup import PAPER, scenario
from moonpool.kvstore.eviction import make_policy
from moonpool.kvstore.eviction.chain_cache import ChainCache
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.trace import BLOCK_TOKENS, TraceRequest
from moonpool.simulator.simulation import Simulation

HITS_TERMS = """\
Hit ratio in tokens of one cache for the whole trace, without timing and without warm-up. A request's longest
cached prefix is looked up before any of it is inserted. Where the prefix ends within a block, half a block
counts, since the paper's blocks are smaller than the trace's. Divided by the sum of the input lengths.
Eviction: LRU, as in the paper; beside it the prefix policy that Moonpool uses.
"""
# Capacity in tokens and the paper's hit ratio, conversation trace.
_UNLIMITED = 10**9
PAPER_HITS = {
    1_000_000: 0.087,
    2_000_000: 0.12,
    3_000_000: 0.165,
    10_000_000: 0.325,
    50_000_000: 0.398,
    _UNLIMITED: 0.40,
}
_TOLERANCE = 0.015


def measure_hits(requests: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for tokens, paper in PAPER_HITS.items():
        case = "unlimited" if tokens == _UNLIMITED else f"{tokens // 10**6} M tokens"
        say(case)
        lru = hit_ratio(requests, "lru", tokens)
        rows.append(versus(Row(case, "LRU hit ratio", lru, "of input tokens"), PAPER, paper))
        difference = abs(lru - paper)
        rows.append(Row(case, "off the paper's", difference, "", limit="at most", limit_value=_TOLERANCE))
        rows.append(Row(case, "prefix hit ratio", hit_ratio(requests, "prefix", tokens), "of input tokens"))
    return rows


def hit_ratio(requests: Sequence[TraceRequest], policy: str, capacity_tokens: int) -> float:
    """Return the fraction of the input tokens that hit, under the conditions in ``HITS_TERMS``."""
    num_ids = len({block_id for request in requests for block_id in request.block_ids})
    capacity = min(capacity_tokens // BLOCK_TOKENS, num_ids)
    cache: ChainCache[int] = ChainCache(capacity, make_policy(policy, capacity))
    hit_tokens = 0.0
    for request in requests:
        num_hits = cache.use(request.block_ids)
        whole = min(num_hits * BLOCK_TOKENS, request.input_tokens)
        hit_tokens += whole + min(BLOCK_TOKENS / 2, request.input_tokens - whole)
        insert(cache, request.block_ids, num_hits)
    return hit_tokens / sum(request.input_tokens for request in requests)


POOLING_TERMS = """\
Prompt tokens found in a cache, of all prompt tokens of the trace; 10 prefill nodes with a cache of 3 M
tokens, timed. Shared: kv-aware, which reads prefixes from other nodes. Own: a node uses its own cache
alone, with placement by load (least-loaded) or by cache too (local-cache). The paper does not say which of
the two its local caches are. Its values are read off a plot.
"""
_NODES = 10
_PAPER_POOLED = {"least-loaded": 0.17, "local-cache": 0.17, "kv-aware": 0.375}
_NAMES = {
    "least-loaded": "each node's own, placed by load",
    "local-cache": "each node's own, placed by cache",
    "kv-aware": "shared",
}


def measure_pooling(requests: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for policy, paper in _PAPER_POOLED.items():
        say(policy)
        outcome = Simulation(scenario(policy, prefill=_NODES, decode=_NODES), requests).run()
        case = _NAMES[policy]
        rows.append(versus(Row(case, "hit ratio", outcome.hit_ratio, "of input tokens"), PAPER, paper))
        rows.append(Row(case, "prefill GPU time", outcome.prefill_busy_s, "GPU s"))
        rows.append(Row(case, "mean TTFT", outcome.mean_ttft_s, "s"))
    return rows
