"""Prefixes that are generated for a trace without them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.bench.eviction.replay import replay
from moonpool.simulator.inputs.prefixes import with_prefixes
from moonpool.simulator.inputs.trace import TraceRequest, load_trace

TRACE = Path(__file__).parents[3] / "shared/data/conversation_trace.jsonl.gz"
# Parts of the distinct blocks that a cache holds.
PARTS = (0.0055, 0.055, 0.164, 0.27, 1.0)


def bare(count: int, seed: int) -> list[TraceRequest]:
    """Requests whose lengths spread as widely as those of the Azure code trace."""
    rng = random.Random(seed)
    return [TraceRequest(float(i), round(rng.lognormvariate(7.3, 0.8)) + 1, 10, ()) for i in range(count)]


def hits(requests: list[TraceRequest]) -> list[float]:
    """The hit ratio of an LRU cache that holds each of ``PARTS``."""
    chains = [request.block_ids for request in requests]
    distinct = len({block_id for chain in chains for block_id in chain})
    return [replay(chains, "lru", max(round(part * distinct), 1)).hit_rate for part in PARTS]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 16), st.sampled_from([16, 128, 512]))
def test_lengths_are_kept_and_ids_name_whole_prefixes(seed: int, block_tokens: int) -> None:
    plain = bare(60, seed)
    found = with_prefixes(plain, block_tokens=block_tokens, seed=seed)
    assert found == with_prefixes(plain, block_tokens=block_tokens, seed=seed)
    assert [replace(request, block_ids=()) for request in found] == plain
    parents: dict[int, int] = {}
    for request in found:
        ids = request.block_ids
        assert len(ids) == -(-request.input_tokens // block_tokens)
        for before, here in zip((-1, *ids), ids, strict=False):
            assert parents.setdefault(here, before) == before


def test_a_block_that_is_not_full_is_not_shared() -> None:
    found = with_prefixes(bare(400, 3), block_tokens=128, seed=3)
    partial = [request.block_ids[-1] for request in found if request.input_tokens % 128]
    every = [block_id for request in found for block_id in request.block_ids]
    assert len(every) > len(set(every)), "there are shared ones"
    assert all(every.count(block_id) == 1 for block_id in partial[:50])


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is not here")
def test_the_hit_curve_is_that_of_the_conversation_trace() -> None:
    expected = hits(load_trace(TRACE))
    found = hits(with_prefixes(bare(8819, 1), block_tokens=128, seed=1))
    assert found == pytest.approx(expected, abs=0.03)
