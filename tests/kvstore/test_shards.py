"""Between any two ways to cut a block over ranks, every byte goes once, to where it belongs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.blocks.shards import BlockShard, canonical_runs, overlaps
from moonpool.kvstore.errors import LayoutError


@st.composite
def plans(draw: st.DrawFn, num_layers: int, num_heads: int) -> list[BlockShard]:
    """Stages of any sizes, heads over as many ranks as there are heads, or more, which then hold the same."""
    cuts = sorted({0, num_layers, *draw(st.lists(st.integers(1, num_layers), max_size=3))})
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if num_heads % n == 0 or n % num_heads == 0]))
    count = max(1, num_heads // tp)
    heads = [range(first := i * num_heads // tp, first + count) for i in range(tp)]
    return [BlockShard(range(first, end), some) for first, end in pairwise(cuts) for some in heads]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KVLayout, list[BlockShard], list[BlockShard]]:
    layers, heads = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4]))
    layout = KVLayout(layers, heads, draw(st.sampled_from([1, 2])), 2, "float16")
    return layout, draw(plans(layers, heads)), draw(plans(layers, heads))


def num_tasks(layout: KVLayout, shards: list[BlockShard]) -> list[np.ndarray]:
    """Each shard's bytes of a block without equal bytes."""
    whole = np.arange(layout.block_nbytes, dtype=np.int32).reshape(*layout.shape, -1)
    return [
        whole[shard.layers.start : shard.layers.stop, :, shard.heads.start : shard.heads.stop].reshape(-1)
        for shard in shards
    ]


@given(pairs())
def test_every_target_gets_each_of_its_bytes_once(pair) -> None:
    layout, sources, targets = pair
    held, wanted = num_tasks(layout, sources), num_tasks(layout, targets)
    for place, (target, expected) in enumerate(zip(targets, wanted, strict=True)):
        got = np.full(len(expected), -1)
        for overlap in overlaps(layout, sources, target, place):
            for run in overlap.runs:
                into = got[run.target : run.target + run.nbytes]
                assert (into == -1).all(), "a byte came twice"
                into[:] = held[overlap.source][run.source : run.source + run.nbytes]
        assert (got == expected).all()


@given(pairs())
def test_only_those_are_read_that_hold_something(pair) -> None:
    layout, sources, targets = pair
    for target in targets:
        for overlap in overlaps(layout, sources, target):
            source = sources[overlap.source]
            assert set(source.layers) & set(target.layers)
            assert set(source.heads) & set(target.heads)


@given(pairs())
def test_equal_layouts_are_one_span_a_block(pair) -> None:
    layout, sources, _ = pair
    for i, source in enumerate(sources):
        (overlap,) = overlaps(layout, sources, source, i)
        assert sources[overlap.source] == source
        assert [(run.source, run.target, run.nbytes) for run in overlap.runs] == [
            (0, 0, source.block_nbytes(layout))
        ]


@given(pairs())
def test_a_stage_of_all_heads_is_one_run(pair) -> None:
    layout, _, targets = pair
    for target in targets:
        (overlap,) = overlaps(layout, [BlockShard.whole(layout)], target)
        one = target.heads == range(layout.num_kv_heads)
        assert len(overlap.runs) == (1 if one else 2 * len(target.layers))


@given(pairs())
def test_the_whole_block_in_order(pair) -> None:
    layout, sources, _ = pair
    held = num_tasks(layout, sources)
    whole = np.concatenate(
        [held[i][run.source : run.source + run.nbytes] for i, run in canonical_runs(layout, sources)]
    )
    assert (whole == np.arange(layout.block_nbytes)).all()


def test_targets_that_want_the_same_spread_over_copies() -> None:
    layout = KVLayout(2, 1, 8, 4, "float32")
    copies = [BlockShard.whole(layout)] * 2
    assert [overlaps(layout, copies, copies[0], place)[0].source for place in range(3)] == [0, 1, 0]


def test_sources_that_lack_something_are_named() -> None:
    layout = KVLayout(4, 2, 8, 4, "float32")
    half = BlockShard(range(2), range(2))
    with pytest.raises(LayoutError, match="layers 0 to 3, KV heads 0 to 1 are not held once each"):
        overlaps(layout, [half], BlockShard.whole(layout))
