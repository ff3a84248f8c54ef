"""Attention over parts of a context, and of a few queries at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonpool.kernels import dispatch, reference
from tests.kernels.attending import decode, prefill
from tests.kernels.paged import PagedBatch, Shape, assert_near

DECODES = Shape(((1, 1), (1, 15), (1, 16), (1, 17), (1, 300)))
CHUNKS = Shape(((1, 1), (16, 16), (5, 20), (70, 200)))
VARIANTS = [{}, {"window": 9}, {"soft_cap": 2.0}, {"head_dim": 40, "num_heads": 7, "num_kv_heads": 1}]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_lse_is_the_logarithm_of_the_sum(
    form: ModuleType, dtype: torch.dtype, variant: dict[str, int]
) -> None:
    for shape, attend in ((DECODES, decode), (CHUNKS, prefill)):
        batch = PagedBatch(replace(shape, dtype=dtype, **variant))
        lse = torch.full(batch.q.shape[:2], float("nan"))
        out = attend(form, batch, lse=lse)
        expected, expected_lse = batch.expected_states()
        assert_near(out, expected, dtype)
        # Scores of a few units, summed in float32 whatever the dtype.
        assert_near(lse, expected_lse, torch.float32, factor=4)


def test_query_that_sees_no_key(form: ModuleType) -> None:
    batch = PagedBatch(replace(DECODES, window=4))
    lse = torch.zeros(batch.q.shape[:2])
    # Every query stands far behind the last key, whose window does not reach back to it.
    out = decode(form, batch, q_positions=batch.context_lens + 10, lse=lse)
    assert out.eq(0).all()
    assert lse.isneginf().all()
    lse = torch.zeros(batch.q.shape[:2])
    starts = torch.arange(len(batch.q) + 1, dtype=torch.int32)
    out = form.paged_prefill_attention(
        batch.q, batch.pool, 1, batch.block_table, starts, batch.context_lens,
        q_positions=batch.context_lens + 10, lse=lse, **batch.rules,
    )  # fmt: skip
    assert out.eq(0).all()
    assert lse.isneginf().all()


def test_queries_behind_all_keys_see_them_all(form: ModuleType) -> None:
    """The queries of a rank without new tokens."""
    batch = PagedBatch(replace(CHUNKS, lens=((5, 20),)))
    out = prefill(form, batch, q_positions=torch.tensor([20], dtype=torch.int32))
    last = PagedBatch(replace(CHUNKS, lens=((5, 20),)))
    for row in range(5):
        alone = form.paged_decode_attention(
            last.q[row : row + 1], last.pool, 1, last.block_table, last.context_lens, **last.rules
        )
        assert_near(out[row : row + 1], alone.double(), torch.float32)


def attend_in_parts(form: ModuleType, batch: PagedBatch, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Each sequence's keys cut at multiples of its blocks, as ranks would hold them, then merged."""
    size, lens = batch.shape.block_size, batch.context_lens
    first_query = lens - (batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1])
    outs, lses = [], []
    edges = [0, *sorted(cuts), batch.block_table.shape[1]]
    for begin, end in pairwise(edges):
        held = (lens - begin * size).clamp(0, (end - begin) * size)
        lse = torch.empty(batch.q.shape[:2])
        outs.append(
            prefill(
                form,
                batch,
                block_table=batch.block_table[:, begin:end].contiguous(),
                context_lens=held,
                q_positions=first_query - begin * size,
                lse=lse,
            )
        )
        lses.append(lse)
    return dispatch.merge_attention_states(torch.stack(outs), torch.stack(lses))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 140)), min_size=1, max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([0, 5, 40]),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([torch.float32, torch.float16]),
    st.integers(0, 1000),
)
def test_parts_merge_to_the_whole(
    form: ModuleType,
    lens: list[tuple[int, int]],
    cuts: list[int],
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Context parallelism: for any split of the blocks, the merge equals attention over all of them."""
    shape = Shape(
        tuple((min(new, total), total) for new, total in lens), window=window, soft_cap=soft_cap, dtype=dtype
    )
    batch = PagedBatch(shape, seed)
    columns = batch.block_table.shape[1]
    merged, lse = attend_in_parts(form, batch, [min(cut, columns) for cut in cuts])
    expected, expected_lse = batch.expected_states()
    # Each part is rounded to the dtype before it is merged.
    assert_near(merged, expected, dtype, factor=2)
    assert_near(lse, expected_lse, torch.float32, factor=4)


@pytest.mark.parametrize("q_len", [1, 3, 16])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_few_queries_a_sequence(form: ModuleType, q_len: int, variant: dict[str, int]) -> None:
    totals = (16, 17, 40, 300)
    batch = PagedBatch(Shape(tuple((q_len, total) for total in totals), **variant))
    q = batch.q.view(len(totals), q_len, *batch.q.shape[1:])
    lse = torch.empty(q.shape[:3])
    out = decode(form, batch, q=q, lse=lse)
    assert out.shape == q.shape
    expected, expected_lse = batch.expected_states()
    assert_near(out.flatten(0, 1), expected, torch.float32)
    assert_near(lse.flatten(0, 1), expected_lse, torch.float32, factor=4)
    filled = torch.full_like(q, float("nan"))
    assert decode(form, batch, q=q, out=filled) is filled
    assert torch.equal(filled, out)


def test_queries_before_the_first_token_give_zeros(form: ModuleType) -> None:
    """A padded batch: a sequence of two tokens with four queries, and an empty one."""
    batch = PagedBatch(Shape(((1, 2), (1, 20))))
    lens = torch.tensor([2, 0], dtype=torch.int32)
    batch.block_table[1] = -1
    q = torch.randn(2, 4, 4, 32)
    out = decode(form, batch, q=q, context_lens=lens, out=torch.full_like(q, float("nan")))
    assert out[0, :2].eq(0).all()
    assert out[0, 2:].ne(0).any(-1).all()
    assert out[1].eq(0).all()


def test_multi_query_decode_equals_single_queries(form: ModuleType, dtype: torch.dtype) -> None:
    """The result of a speculated token does not depend on their number, within the tolerance."""
    batch = PagedBatch(Shape(((4, 40), (4, 77)), dtype=dtype))
    q = batch.q.view(2, 4, 4, 32)
    together = decode(form, batch, q=q)
    for j in range(4):
        alone = decode(form, batch, q=q[:, j].contiguous(), context_lens=batch.context_lens - 3 + j)
        assert_near(together[:, j], alone.double(), dtype, factor=2)


@pytest.mark.parametrize("head_dim", [8, 40, 128])
def test_merging_is_the_same_in_every_form(form: ModuleType, dtype: torch.dtype, head_dim: int) -> None:
    outs, lses = torch.randn(3, 50, 4, head_dim).to(dtype), torch.randn(3, 50, 4) * 20
    lses[0, :20], lses[1, 10:30], lses[:, 15] = float("-inf"), float("-inf"), float("-inf")
    out, lse = form.merge_attention_states(outs, lses)
    expected, expected_lse = reference.merge_attention_states(outs.double(), lses)
    assert out.dtype == dtype
    assert_near(out, expected, dtype)
    torch.testing.assert_close(lse, expected_lse)  # also where nothing was seen


def test_merged_states_can_be_merged_again() -> None:
    outs, lses = torch.randn(6, 3, 2, 8), torch.randn(6, 3, 2) * 3
    lses[2] = float("-inf")
    whole, lse = reference.merge_attention_states(outs, lses)
    pairs = [dispatch.merge_attention_states(outs[i : i + 2], lses[i : i + 2]) for i in (0, 2, 4)]
    again, again_lse = dispatch.merge_attention_states(
        torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
    )
    assert_near(again, whole.double(), torch.float32, factor=2)
    assert_near(again_lse, lse.double(), torch.float32, factor=2)


def attention_over(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scores: [n, heads, keys]; values: [keys, dim]."""
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def test_merging_parts_gives_the_whole() -> None:
    scores, values = torch.randn(5, 3, 40) * 10, torch.randn(40, 16)
    whole, lse = attention_over(scores.double(), values.double())
    parts = [attention_over(scores[..., a:b], values[a:b]) for a, b in ((0, 1), (1, 30), (30, 40))]
    outs, lses = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    merged, merged_lse = reference.merge_attention_states(outs, lses)
    assert_near(merged, whole, torch.float32)
    assert_near(merged_lse, lse, torch.float32)


def test_part_without_visible_keys_is_ignored() -> None:
    outs, lses = torch.randn(2, 4, 1, 8), torch.zeros(2, 4, 1)
    outs[1, :2], lses[1, :2] = float("nan"), float("-inf")
    outs[:, 3], lses[:, 3] = float("nan"), float("-inf")
    merged, lse = dispatch.merge_attention_states(outs, lses)
    assert torch.equal(merged[:2], outs[0, :2])
    assert torch.allclose(merged[2], outs[:, 2].mean(0))
    assert merged[3].eq(0).all()
    assert lse[3].isneginf()
