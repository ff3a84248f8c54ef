"""How batches are checked and cut up: laws over random spans."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from moonpool.transfer import Span, SpanError, Spans
from moonpool.transfer.memory.chunks import Chunking, ChunkPlan, Rows, windows
from moonpool.transfer.memory.span import check_bounds, check_disjoint, check_pairs

Triples = list[tuple[int, int, int]]  # gap here, gap there, nbytes


@st.composite
def batches(draw: st.DrawFn) -> tuple[Spans, Spans]:
    """Disjoint, non-empty spans of two regions of the peer, some adjacent on one side or both."""
    triples: Triples = draw(
        st.lists(
            st.tuples(st.sampled_from([0, 0, 5]), st.sampled_from([0, 0, 9]), st.integers(1, 300)),
            min_size=1,
            max_size=30,
        )
    )
    here = there = 1000
    local, remote = [], []
    for gap_here, gap_there, nbytes in triples:
        here, there = here + gap_here, there + gap_there
        local.append(Span(1, here, nbytes))
        remote.append(Span(7 + (there % 2), there, nbytes))
        here, there = here + nbytes, there + nbytes
    order = draw(st.permutations(range(len(local)))) if draw(st.booleans()) else range(len(local))
    return Spans.of([local[i] for i in order]), Spans.of([remote[i] for i in order])


def moves(rows: Rows) -> dict[int, tuple[int, int]]:
    """Which byte here comes from which (region, byte) there."""
    found = {}
    for address, region, offset, nbytes in zip(
        rows.address.tolist(), rows.region.tolist(), rows.offset.tolist(), rows.nbytes.tolist(), strict=True
    ):
        for i in range(nbytes):
            assert address + i not in found
            found[address + i] = (region, offset + i)
    return found


@given(batches(), st.integers(1, 400), st.integers(1, 8), st.booleans())
def test_a_plan_moves_the_same_bytes_within_its_limits(
    batch: tuple[Spans, Spans], chunk_nbytes: int, chunk_rows: int, merge: bool
) -> None:
    local, remote = batch
    plan = ChunkPlan(local, local.offset, remote, Chunking(chunk_nbytes, chunk_rows), merge=merge)
    assert moves(plan.rows) == moves(Rows(local.offset, remote.region, remote.offset, local.nbytes))
    assert [row for begin, end in plan.chunks for row in range(begin, end)] == list(range(len(plan.rows)))
    for begin, end in plan.chunks:
        assert end - begin <= chunk_rows
        assert plan.rows[begin:end].total_nbytes <= chunk_nbytes


@given(batches(), st.integers(1, 400), st.integers(1, 8), st.booleans(), st.randoms())
def test_spans_are_complete_when_all_their_bytes_are(
    batch: tuple[Spans, Spans], chunk_nbytes: int, chunk_rows: int, merge: bool, random: st.DataObject
) -> None:
    local, remote = batch
    plan = ChunkPlan(local, local.offset, remote, Chunking(chunk_nbytes, chunk_rows), merge=merge)
    chunks = list(range(len(plan.chunks)))
    random.shuffle(chunks)  # type: ignore[attr-defined]
    there: set[int] = set()
    complete: list[int] = []
    for chunk in chunks:
        begin, end = plan.chunks[chunk]
        there |= moves(plan.rows[begin:end]).keys()
        complete += plan.done(chunk).tolist()
        for index, (start, nbytes) in enumerate(
            zip(local.offset.tolist(), local.nbytes.tolist(), strict=True)
        ):
            assert (index in complete) == there.issuperset(range(start, start + nbytes))
    assert sorted(complete) == list(range(len(local)))


@given(batches())
def test_adjacent_runs_become_one(batch: tuple[Spans, Spans]) -> None:
    local, remote = batch
    rows = Rows(local.offset, remote.region, remote.offset, local.nbytes).merged()
    for i in range(1, len(rows)):
        assert not (
            rows.address[i - 1] + rows.nbytes[i - 1] == rows.address[i]
            and rows.region[i - 1] == rows.region[i]
            and rows.offset[i - 1] + rows.nbytes[i - 1] == rows.offset[i]
        )


@given(st.lists(st.integers(1, 100), max_size=50), st.integers(1, 10), st.integers(1, 150))
def test_windows_cover_all_rows_within_the_limits(sizes: list[int], most_rows: int, most_nbytes: int) -> None:
    nbytes = np.array(sizes, np.uint64)
    ranges = windows(nbytes, most_rows, most_nbytes)
    assert [row for begin, end, _ in ranges for row in range(begin, end)] == list(range(len(sizes)))
    for begin, end, whole in ranges:
        assert whole == sum(sizes[begin:end])
        assert end - begin <= most_rows
        assert end - begin == 1 or whole <= most_nbytes


u64 = st.one_of(st.integers(0, 300), st.integers((1 << 64) - 300, (1 << 64) - 1))


@given(u64, u64, st.integers(1, 200))
def test_bounds_are_exact_and_cannot_overflow(offset: int, nbytes: int, size: int) -> None:
    spans = Spans.of([Span(1, offset, nbytes)])
    if nbytes > 0 and offset + nbytes <= size:
        check_bounds(spans, 1, size, np.arange(1))
    else:
        with pytest.raises(SpanError):
            check_bounds(spans, 1, size, np.arange(1))


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 60), st.integers(1, 10)), min_size=1, max_size=8))
def test_overlaps_are_found(triples: Triples) -> None:
    seen: set[tuple[int, int]] = set()
    overlap = False
    for region, offset, nbytes in triples:
        bytes_of = {(region, offset + i) for i in range(nbytes)}
        overlap = overlap or not seen.isdisjoint(bytes_of)
        seen |= bytes_of
    spans = Spans.of([Span(*triple) for triple in triples])
    if overlap:
        with pytest.raises(SpanError, match="overlaps"):
            check_disjoint(spans)
    else:
        check_disjoint(spans)


def test_packed_spans_are_checked_like_others() -> None:
    spans = Spans.blocks(3, np.array([0, 8192]), 4096)
    again = Spans.of(spans)
    assert again.total_nbytes == 8192
    assert again.region.dtype == np.uint32
    check_pairs(spans, again)
    bad = np.array([0, -8])
    with pytest.raises(SpanError) as caught:
        Spans.of(Spans(np.zeros(2, np.int64), bad, np.ones(2, np.int64)))  # type: ignore[arg-type]
    assert caught.value.index == 1
    with pytest.raises(SpanError, match="integers"):
        Spans.of(Spans(np.zeros(1), np.zeros(1), np.ones(1)))  # type: ignore[arg-type]
    with pytest.raises(SpanError, match="length"):
        Spans(np.zeros(1, np.uint32), np.zeros(2, np.uint64), np.zeros(1, np.uint64))
