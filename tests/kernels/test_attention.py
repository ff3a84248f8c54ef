"""Paged attention against its definition; unused memory is never read."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kernels import reference
from moonpool.kernels.cpu.library import load
from moonpool.kernels.reference import FP8
from tests.kernels.attending import decode, prefill
from tests.kernels.paged import PagedBatch, Shape, assert_near

# Length 1, a block less one, exactly a block, one over; with and without a cached prefix.
DECODES = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 300))
CHUNKS = ((1, 1), (16, 16), (17, 17), (5, 20), (1, 40), (70, 200))


@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 96, 128, 256])
def test_head_dims(form: ModuleType, dtype: torch.dtype, head_dim: int) -> None:
    batch = PagedBatch(Shape(DECODES, head_dim=head_dim, dtype=dtype))
    assert_near(decode(form, batch), batch.expected(), dtype)
    batch = PagedBatch(Shape(((3, 3), (20, 85)), head_dim=head_dim, dtype=dtype))
    assert_near(prefill(form, batch), batch.expected(), dtype)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1), (7, 1), (100, 1)])
def test_groups_of_heads(form: ModuleType, num_heads: int, num_kv_heads: int) -> None:
    heads = Shape(((1, 20), (1, 70)), num_heads=num_heads, num_kv_heads=num_kv_heads)
    batch = PagedBatch(heads)
    assert_near(decode(form, batch), batch.expected(), torch.float32)
    batch = PagedBatch(replace(heads, lens=((3, 20), (5, 5))))
    assert_near(prefill(form, batch), batch.expected(), torch.float32)


@pytest.mark.parametrize("block_size", [8, 16, 64, 512])
def test_block_sizes(form: ModuleType, dtype: torch.dtype, block_size: int) -> None:
    lens = tuple((1, n) for n in (1, block_size - 1, block_size, block_size + 1, 2 * block_size))
    batch = PagedBatch(Shape(lens, block_size=block_size, dtype=dtype))
    assert_near(decode(form, batch), batch.expected(), dtype)
    lens = ((block_size, block_size), (3, block_size + 1), (1, block_size))
    batch = PagedBatch(Shape(lens, block_size=block_size, dtype=dtype, num_heads=2, num_kv_heads=1))
    assert_near(prefill(form, batch), batch.expected(), dtype)


@pytest.mark.parametrize("window", [1, 7, 16, 17, 64, 1000])
def test_sliding_window(form: ModuleType, window: int) -> None:
    """Blocks before the window are -1 in the table."""
    batch = PagedBatch(Shape(DECODES, window=window))
    assert_near(decode(form, batch), batch.expected(), torch.float32)
    batch = PagedBatch(Shape(CHUNKS, window=window))
    assert_near(prefill(form, batch), batch.expected(), torch.float32)


def test_soft_cap(form: ModuleType, dtype: torch.dtype) -> None:
    batch = PagedBatch(Shape(DECODES, soft_cap=2.0, dtype=dtype))
    assert_near(decode(form, batch), batch.expected(), dtype)
    batch = PagedBatch(Shape(CHUNKS, soft_cap=2.0, window=30, dtype=dtype))
    assert_near(prefill(form, batch), batch.expected(), dtype)


def test_decode_is_prefill_of_one_token(form: ModuleType) -> None:
    batch = PagedBatch(Shape(DECODES))
    assert_near(decode(form, batch), prefill(form, batch), torch.float32)


def test_a_padded_batch_row_gives_zeros(form: ModuleType) -> None:
    batch = PagedBatch(Shape(((1, 5), (1, 20))))
    batch.context_lens[1] = 0
    batch.block_table[1] = -1
    out = decode(form, batch, out=torch.full_like(batch.q, float("nan")))
    assert out[1].eq(0).all()
    assert not out.isnan().any()


def test_nothing_to_do(form: ModuleType) -> None:
    batch = PagedBatch(Shape(((0, 20), (3, 20), (0, 1))))
    assert_near(prefill(form, batch), batch.expected(), torch.float32)
    empty = PagedBatch(Shape(()))
    assert prefill(form, empty).shape == (0, 4, 32)
    assert decode(form, empty).shape == (0, 4, 32)


def test_out_is_filled_and_returned(form: ModuleType) -> None:
    batch = PagedBatch(Shape(DECODES))
    out = torch.full_like(batch.q, float("nan"))
    assert decode(form, batch, out=out) is out
    assert_near(out, batch.expected(), torch.float32)
    out = torch.full_like(batch.q, float("nan"))
    assert prefill(form, batch, out=out) is out
    assert_near(out, batch.expected(), torch.float32)


def test_a_pool_with_any_strides(form: ModuleType) -> None:
    """The pool is a permuted view of another layout."""
    batch = PagedBatch(Shape(CHUNKS))
    expected = prefill(form, batch)
    layer_major = batch.pool.permute(1, 2, 0, 3, 4, 5).contiguous().permute(2, 0, 1, 3, 4, 5)
    assert not layer_major.is_contiguous()
    batch.pool = layer_major
    assert torch.equal(prefill(form, batch), expected)


def test_large_scores_stay_finite(form: ModuleType) -> None:
    batch = PagedBatch(Shape(CHUNKS))
    batch.q = batch.q * 1000
    assert_near(prefill(form, batch), batch.expected(), torch.float32, factor=300)
    batch = PagedBatch(Shape(DECODES))
    batch.q = batch.q * 1000
    assert_near(decode(form, batch), batch.expected(), torch.float32, factor=300)


def test_nan_in_a_visible_key_reaches_the_result(form: ModuleType) -> None:
    batch = PagedBatch(Shape(((1, 20), (1, 20))))
    place = batch.block_table[0, 0]
    batch.pool[place, batch.shape.layer, 0, :, 3] = float("nan")
    out = decode(form, batch)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


needs_library = pytest.mark.skipif(load() is None, reason="no compiler here")


@needs_library
def test_sequence_is_independent_of_its_batch(dtype: torch.dtype) -> None:
    """Bit-identical in any batch and for any chunks of a prompt."""
    from moonpool.kernels.cpu import operations as ops

    batch = PagedBatch(Shape(DECODES, dtype=dtype))
    together = decode(ops, batch)
    for i in range(len(DECODES)):
        alone = ops.paged_decode_attention(
            batch.q[i : i + 1],
            batch.pool,
            1,
            batch.block_table[i : i + 1],
            batch.context_lens[i : i + 1],
            **batch.rules,
        )
        assert torch.equal(alone[0], together[i])


@needs_library
@pytest.mark.parametrize("window", [0, 70])
def test_result_is_independent_of_chunks(dtype: torch.dtype, window: int) -> None:
    """Bit-identical, also with a window: which part of a tile is computed depends on the chunk."""
    from moonpool.kernels.cpu import operations as ops

    complete = PagedBatch(Shape(((150, 150),), dtype=dtype))
    complete.shape = replace(complete.shape, window=window)
    at_once = prefill(ops, complete)
    for first, end in ((0, 33), (33, 64), (64, 149), (149, 150)):
        chunk = ops.paged_prefill_attention(
            complete.q[first:end],
            complete.pool,
            1,
            complete.block_table,
            torch.tensor([0, end - first], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            **complete.rules,
        )
        assert torch.equal(chunk, at_once[first:end])


shapes = st.builds(
    lambda lens, group, kv_heads, head_dim, block_size, window, soft_cap, dtype: Shape(
        tuple((min(new, total), total) for new, total in lens),
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        soft_cap=soft_cap,
        dtype=dtype,
    ),
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 140)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([8, 32, 48, 64, 80, 128]),
    st.sampled_from([8, 16, 32, 64]),
    st.one_of(st.just(0), st.integers(1, 150)),
    st.sampled_from([0.0, 5.0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)


@needs_library
@settings(max_examples=60)
@given(shapes, st.integers(0, 1000))
def test_compiled_equals_reference(shape: Shape, seed: int) -> None:
    from moonpool.kernels.cpu import operations as ops

    batch = PagedBatch(shape, seed)
    assert_near(prefill(ops, batch), prefill(reference, batch), shape.dtype, factor=2)
    batch = PagedBatch(replace(shape, lens=tuple((1, total) for _, total in shape.lens)), seed)
    assert_near(decode(ops, batch), decode(reference, batch), shape.dtype, factor=2)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, FP8])
@pytest.mark.parametrize(("num_heads", "queries"), [(2, 4), (6, 4), (4, 2), (14, 16)])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (19, 2.0)])
def test_a_few_queries_of_each_sequence(
    form: ModuleType, dtype: torch.dtype, kv_dtype: torch.dtype | None, num_heads: int, queries: int,
    window: int, soft_cap: float,
) -> None:  # fmt: skip
    """Each as if it were alone: a token sees those before it, in its window, also across chunks."""
    lens = tuple((queries, n) for n in (queries, 17, 32, 258, 300))
    shape = Shape(lens, num_heads, 2, dtype=dtype, kv_dtype=kv_dtype, window=window, soft_cap=soft_cap)
    batch = PagedBatch(shape)
    q = batch.q.view(len(lens), queries, num_heads, 32)
    lse = torch.empty(q.shape[:3])
    out = decode(form, batch, q=q, lse=lse)
    expected, expected_lse = batch.expected_states()
    assert_near(out.flatten(0, 1), expected, dtype)
    assert_near(lse.flatten(0, 1), expected_lse, dtype, factor=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (19, 2.0)])
def test_proposals_of_different_lengths(
    form: ModuleType, dtype: torch.dtype, window: int, soft_cap: float
) -> None:
    lens = ((1, 17), (5, 5), (2, 300), (4, 258), (1, 1))
    batch = PagedBatch(Shape(lens, 6, 2, dtype=dtype, window=window, soft_cap=soft_cap))
    lse = torch.empty(batch.q.shape[:2])
    out = prefill(form, batch, max_q_len=5, lse=lse)
    expected, expected_lse = batch.expected_states()
    assert_near(out, expected, dtype)
    assert_near(lse, expected_lse, dtype, factor=4)


def test_sequences_without_new_tokens_beside_proposals(form: ModuleType, dtype: torch.dtype) -> None:
    batch = PagedBatch(Shape(((0, 20), (2, 40), (0, 0), (3, 300), (0, 16)), dtype=dtype))
    assert_near(prefill(form, batch, max_q_len=3), batch.expected(), dtype)


@needs_library
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_proposals_have_the_bits_of_plain_decoding(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    from moonpool.kernels.cpu import operations as ops

    lens = ((1, 17), (5, 40), (2, 300))
    batch = PagedBatch(Shape(lens, heads, kv_heads, head_dim, dtype=dtype))
    together = prefill(ops, batch, max_q_len=5)
    row = 0
    for i, (new, total) in enumerate(lens):
        for length in range(total - new + 1, total + 1):
            alone = ops.paged_decode_attention(
                batch.q[row : row + 1],
                batch.pool,
                1,
                batch.block_table[i : i + 1],
                torch.tensor([length], dtype=torch.int32),
                **batch.rules,
            )
            assert torch.equal(alone[0], together[row])
            row += 1


def test_queries_before_the_first_token_give_zeros(form: ModuleType) -> None:
    batch = PagedBatch(Shape(((2, 2), (4, 40))))
    q = torch.randn(2, 4, 4, 32)
    lse = torch.empty(2, 4, 4)
    out = decode(form, batch, q=q, lse=lse)
    assert out[0, :2].eq(0).all()
    assert lse[0, :2].isneginf().all()
    assert not out.isnan().any()
