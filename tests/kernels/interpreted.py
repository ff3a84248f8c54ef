"""The Triton forms against float64: on a GPU, or with TRITON_INTERPRET=1 on the CPU in Triton's interpreter.

test_triton.py runs this file in a process of its own, interpreted; on a machine with a GPU, ``pytest
tests/kernels/interpreted.py`` runs it there. bfloat16 is left out of the interpreter, whose arithmetic in it
is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels import (
    reference,
    triton_adapters,
    triton_blocks,
    triton_decode,
    triton_experts,
    triton_kv,
    triton_prefill,
    triton_rows,
)
from tests.kernels.paged import PagedBatch, Shape, assert_near

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("no GPU here, and not interpreted", allow_module_level=True)

DECODES = Shape(((1, 1), (1, 16), (1, 17), (1, 150)))
CHUNKS = Shape(((1, 1), (17, 17), (5, 20), (0, 7), (40, 130)))
VARIANTS = [
    {},
    {"window": 20},
    {"soft_cap": 2.0, "dtype": torch.float16},
    {"head_dim": 40, "num_heads": 7, "num_kv_heads": 1},
    {"head_dim": 128, "dtype": torch.float16, "block_size": 64},
    {"block_size": 8, "num_heads": 2, "num_kv_heads": 2, "window": 3},
]
if not INTERPRETED:
    VARIANTS += [{"dtype": torch.bfloat16, "head_dim": dim} for dim in (64, 128, 256)]


@pytest.fixture(autouse=True)
def _tensors_are_made_on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_decode(variant: dict[str, int], num_parts: int) -> None:
    batch = PagedBatch(replace(DECODES, **variant), device=DEVICE)
    out = triton_decode.paged_decode_attention(
        batch.q,
        batch.pool,
        1,
        batch.block_table,
        batch.context_lens,
        **batch.rules,
        num_parts=num_parts,
    )
    assert_near(out, batch.expected(), batch.shape.dtype, factor=2)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_padded_batch_row_gives_zeros(num_parts: int) -> None:
    batch = PagedBatch(Shape(((1, 5), (1, 20))), device=DEVICE)
    batch.context_lens[1] = 0
    batch.block_table[1] = -1
    out = triton_decode.paged_decode_attention(
        batch.q, batch.pool, 1, batch.block_table, batch.context_lens, scale=1.0, num_parts=num_parts
    )
    assert out[1].eq(0).all()
    assert not out.isnan().any()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_prefill(variant: dict[str, int]) -> None:
    batch = PagedBatch(replace(CHUNKS, **variant), device=DEVICE)
    out = triton_prefill.paged_prefill_attention(
        batch.q,
        batch.pool,
        1,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.context_lens,
        **batch.rules,
    )
    assert_near(out, batch.expected(), batch.shape.dtype, factor=2)


def test_more_heads_than_rows() -> None:
    batch = PagedBatch(Shape(((3, 20), (2, 2)), num_heads=40, num_kv_heads=1), device=DEVICE)
    out = triton_prefill.paged_prefill_attention(
        batch.q, batch.pool, 1, batch.block_table, batch.cu_seqlens_q, batch.context_lens, **batch.rules
    )  # fmt: skip
    assert_near(out, batch.expected(), torch.float32, factor=2)


@pytest.mark.parametrize("lens", [[1], [3, 4], [128, 1, 1, 200, 0, 0, 31], [0, 0, 1], [1] * 9])
def test_every_token_has_exactly_one_tile(lens: list[int]) -> None:
    """The law behind sequence_of: tiles starts[i] // T + i … are sequence i's, and there are enough."""
    tokens = 16
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    covered = []
    for tile in range(starts[-1] // tokens + len(lens)):
        sequence = max(i for i in range(len(lens)) if starts[i] // tokens + i <= tile)
        first = (tile - (starts[sequence] // tokens + sequence)) * tokens
        covered += [(sequence, t) for t in range(first, min(first + tokens, lens[sequence]))]
    assert sorted(covered) == [(i, t) for i, n in enumerate(lens) for t in range(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden", [1, 64, 100])
def test_rows(dtype: torch.dtype, hidden: int) -> None:
    x, residual = torch.randn(2, 3, hidden).to(dtype).unbind(0)
    weight = torch.randn(hidden).to(dtype)
    assert_near(triton_rows.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype, 2)
    normed, total = triton_rows.rms_norm(x, weight, 1e-5, residual=residual)
    expected, expected_total = reference.rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(total, expected_total)
    assert_near(normed, expected, dtype, 2)
    gate_up = torch.randn(3, 2 * hidden).to(dtype) * 5
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(triton_rows.silu_mul(gate_up), F.silu(gate) * up, dtype)


@pytest.mark.parametrize(("head_dim", "half"), [(32, 16), (40, 20), (64, 8)])
@pytest.mark.parametrize("normed", ["", "q", "qk"])
def test_rotate_and_write(head_dim: int, half: int, normed: str) -> None:
    pools = [torch.full((4, 2, 2, 2, 8, head_dim), float("nan")) for _ in range(2)]
    qkv, angles = torch.randn(5, 7 * head_dim), torch.rand(20, half)
    slots, positions = torch.tensor([31, -1, 0, 9, 8]), torch.tensor([0, 19, 3, 3, 7])
    norms = torch.randn(2, head_dim)
    q, expected = (
        form.rotate_and_write(
            qkv,
            positions,
            angles.cos(),
            angles.sin(),
            pool,
            1,
            slots,
            num_heads=3,
            num_kv_heads=2,
            head_dim=head_dim,
            q_norm=norms[0] if "q" in normed else None,
            k_norm=norms[1] if "k" in normed else None,
        )
        for form, pool in zip((triton_kv, reference), pools, strict=True)
    )
    assert_near(q, expected, torch.float32)
    assert torch.equal(pools[0].isnan(), pools[1].isnan())
    assert_near(pools[0].nan_to_num(), pools[1].nan_to_num(), torch.float32)


def test_write_kv() -> None:
    pools = [torch.full((4, 2, 2, 3, 8, 20), float("nan")) for _ in range(2)]
    k, v = torch.randn(2, 4, 3, 20).unbind(0)
    for form, pool in zip((triton_kv, reference), pools, strict=True):
        form.write_kv(k, v, pool, 1, torch.tensor([31, -1, 0, 9]))
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


def test_blocks() -> None:
    pool = torch.randn(9, 3, 2, 2, 8, 20).half()
    before, ids = pool.clone(), torch.tensor([7, 0, 3])
    staged = triton_blocks.gather_blocks(pool, ids)
    assert torch.equal(staged, before[ids])
    triton_blocks.copy_blocks(pool, torch.tensor([1, 2]), torch.tensor([7, 0]))
    assert torch.equal(pool[[7, 0]], before[[1, 2]])
    triton_blocks.scatter_blocks(staged, pool, ids)
    assert torch.equal(pool, before)


def test_merge_attention_states() -> None:
    outs, lses = torch.randn(5, 4, 2, 24), torch.randn(5, 4, 2) * 5
    outs[3, :2], lses[3, :2] = float("nan"), float("-inf")
    outs[:, 3], lses[:, 3] = float("nan"), float("-inf")
    merged, lse = triton_decode.merge_attention_states(outs, lses)
    expected, expected_lse = reference.merge_attention_states(outs, lses)
    assert_near(merged, expected, torch.float32, 2)
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert_near(lse[:3], expected_lse[:3], torch.float32, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offsets", [[0, 3, 3, 40], [0, 0, 0, 1], [0, 70, 70, 90], [0, 5, 9, 12]])
def test_grouped_matmul(dtype: torch.dtype, offsets: list[int]) -> None:
    bounds = torch.tensor(offsets, dtype=torch.int32)
    x, weights = torch.randn(offsets[-1] + 2, 72).to(dtype), torch.randn(3, 70, 72).to(dtype)
    out = triton_experts.grouped_matmul(x, weights, bounds)
    assert_near(out, reference.grouped_matmul(x.double(), weights.double(), bounds), dtype, factor=4)
    assert out[offsets[-1] :].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adapters(dtype: torch.dtype) -> None:
    ids = torch.tensor([2, -1, 0, 2, 1], dtype=torch.int32)
    x, y = torch.randn(5, 200).to(dtype), torch.randn(5, 150).to(dtype)
    a, b, scales = torch.randn(3, 6, 200).to(dtype), torch.randn(3, 150, 6).to(dtype), torch.rand(3)
    expected = y.double()
    reference.add_lora(expected, x.double(), a.double(), b.double(), ids, scales)
    triton_adapters.add_lora(y, x, a, b, ids, scales)
    assert_near(y, expected, dtype, factor=4)


@pytest.mark.parametrize(("size", "target_size"), [(16, 16), (8, 32), (32, 8)])
def test_reshard(size: int, target_size: int) -> None:
    num_tokens = 37
    source = torch.randn(-(-num_tokens // size), 3, 2, 4, size, 24)
    shape = (-(-num_tokens // target_size), 2, 2, 2, target_size, 24)
    part = {"num_tokens": num_tokens, "source_head": 1, "num_heads": 2, "source_layer": 1, "num_layers": 2}
    expected, found = torch.zeros(shape, dtype=torch.float16), torch.zeros(shape, dtype=torch.float16)
    reference.reshard_blocks(source, expected, **part)
    triton_blocks.reshard_blocks(source, found, **part)
    assert torch.equal(found, expected)
