"""Figure 9 of FAST'25 and table 1 of the arXiv report: how much a cache of a given size would hit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.bench.eviction.replay import replay
from moonpool.bench.paper.setup import PAPER
from moonpool.kvstore.eviction import make_policy
from moonpool.kvstore.eviction.chain_cache import ChainCache
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.trace import BLOCK_TOKENS, TraceRequest

TERMS = """\
Hit ratio in tokens of one cache for the whole trace, without timing, without warm-up: a request's longest
cached prefix is looked up before anything of it is inserted; where it ends in the middle of a block, half
a block counts, since the paper's blocks are finer than the trace's; divided by the sum of the input
lengths. Eviction: LRU, as in the paper; beside it the prefix policy that Moonpool uses.
"""
TABLE_TERMS = """\
Hit ratio in blocks of one cache for the whole trace, without timing and without warm-up: a block is a hit
when it is there at its turn. The paper's table 1 (arXiv) was measured on another trace of 23,608
requests, which shares more; its values are not at hand, so ours stand alone.
"""

# Capacity in tokens and the paper's hit ratio, conversation trace; without a limit: more than all its blocks.
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
_TABLE_BLOCKS = (1_000, 10_000, 30_000, 50_000, 100_000, _UNLIMITED)
_TABLE_POLICIES = ("lru", "lfu", "length-aware", "prefix")


def measure(requests: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for tokens, paper in PAPER_HITS.items():
        case = "unlimited" if tokens == _UNLIMITED else f"{tokens // 10**6} M tokens"
        say(case)
        lru = hit_ratio(requests, "lru", tokens)
        rows.append(versus(Row(case, "LRU hit ratio", lru, "of input tokens"), PAPER, paper))
        off = Row(case, "off the paper's", abs(lru - paper), "", limit="at most", limit_value=_TOLERANCE)
        rows.append(off)
        rows.append(Row(case, "prefix hit ratio", hit_ratio(requests, "prefix", tokens), "of input tokens"))
    return rows


def measure_table(requests: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    blocks = [request.block_ids for request in requests]
    total = len({block_id for ids in blocks for block_id in ids})
    rows: list[Row] = []
    for capacity in _TABLE_BLOCKS:
        case = "unlimited" if capacity == _UNLIMITED else f"{capacity:,} blocks"
        say(case)
        for policy in _TABLE_POLICIES:
            hits = replay(blocks, policy, min(capacity, total)).hit_rate
            rows.append(Row(case, f"{policy} hit ratio", hits, "of blocks"))
    return rows


def hit_ratio(requests: Sequence[TraceRequest], policy: str, capacity_tokens: int) -> float:
    """Of the input tokens, as ``TERMS`` says."""
    most = len({block_id for request in requests for block_id in request.block_ids})
    capacity = min(capacity_tokens // BLOCK_TOKENS, most)
    cache: ChainCache[int] = ChainCache(capacity, make_policy(policy, capacity))
    hit_tokens = 0.0
    for request in requests:
        ids = request.block_ids
        held = cache.use(ids)
        whole = min(held * BLOCK_TOKENS, request.input_tokens)
        hit_tokens += whole + min(BLOCK_TOKENS / 2, request.input_tokens - whole)
        _insert(cache, ids, held)
    return hit_tokens / sum(request.input_tokens for request in requests)


def _insert(cache: ChainCache[int], ids: Sequence[int], held: int) -> None:
    slots = cache.match(ids)
    cache.pin(slots)
    for i in range(held, len(ids)):
        slot = cache.add(ids[i], ids[i - 1] if i else None)
        if slot is None:
            break
        slots.append(slot)
        cache.pin((slot,))
    cache.unpin(slots)
