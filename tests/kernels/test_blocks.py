"""Whole blocks between the pool and elsewhere, and the merge of attentions over parts."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonpool import kernels
from moonpool.kernels import reference
from tests.kernels.paged import assert_near


def test_gather_then_scatter_puts_every_block_back() -> None:
    pool = torch.randn(9, 2, 2, 2, 8, 16)
    before = pool.clone()
    ids = torch.tensor([7, 0, 3])
    staged = kernels.gather_blocks(pool, ids)
    assert torch.equal(staged, before[ids])
    pool[ids] = float("nan")
    kernels.scatter_blocks(staged, pool, ids)
    assert torch.equal(pool, before)
    out = torch.empty_like(staged)
    assert kernels.gather_blocks(pool, ids, out=out) is out
    assert torch.equal(out, staged)


def test_copy_blocks(form: ModuleType) -> None:
    pool = torch.randn(9, 1, 2, 1, 8, 16).half()
    before = pool.clone()
    form.copy_blocks(pool, torch.tensor([1, 1, 2]), torch.tensor([8, 7, 0]))
    assert torch.equal(pool[[8, 7, 0]], before[[1, 1, 2]])
    assert torch.equal(pool[1:7], before[1:7])


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


def test_a_part_that_saw_nothing_is_not_looked_at() -> None:
    outs, lses = torch.randn(2, 4, 1, 8), torch.zeros(2, 4, 1)
    outs[1, :2], lses[1, :2] = float("nan"), float("-inf")
    outs[:, 3], lses[:, 3] = float("nan"), float("-inf")
    merged, lse = kernels.merge_attention_states(outs, lses)
    assert torch.equal(merged[:2], outs[0, :2])
    assert torch.allclose(merged[2], outs[:, 2].mean(0))
    assert merged[3].eq(0).all()
    assert lse[3].isneginf()


def chain(num_tokens: int, layers: int, heads: int, dim: int) -> torch.Tensor:
    """[tokens, layers, 2, heads, dim], every value its own."""
    return torch.randn(num_tokens, layers, 2, heads, dim)


def blocks_of(tokens: torch.Tensor, block_size: int, fill: float = float("nan")) -> torch.Tensor:
    """The same tokens in blocks; unused slots of the last one hold ``fill``."""
    num_tokens, *shape = tokens.shape
    num_blocks = -(-num_tokens // block_size)
    padded = torch.full((num_blocks * block_size, *shape), fill)
    padded[:num_tokens] = tokens
    return padded.view(num_blocks, block_size, *shape).permute(0, 2, 3, 4, 1, 5).contiguous()


@pytest.mark.parametrize(("tp_from", "tp_to"), [(1, 2), (2, 1), (4, 2), (2, 4), (1, 1)])
@pytest.mark.parametrize(("size_from", "size_to"), [(16, 16), (16, 8), (8, 32)])
@pytest.mark.parametrize("num_tokens", [1, 16, 37])
def test_shards_of_one_layout_make_those_of_another(
    tp_from: int, tp_to: int, size_from: int, size_to: int, num_tokens: int
) -> None:
    heads = 4
    tokens = chain(num_tokens, 3, heads, 8)
    sources = [blocks_of(part, size_from) for part in tokens.chunk(tp_from, dim=3)]
    for rank, expected in enumerate(tokens.chunk(tp_to, dim=3)):
        target = torch.full_like(blocks_of(expected, size_to, 0.0), -1.0)
        mine = range(rank * heads // tp_to, (rank + 1) * heads // tp_to)
        for other, source in enumerate(sources):
            theirs = range(other * heads // tp_from, (other + 1) * heads // tp_from)
            shared = sorted(set(mine) & set(theirs))
            if shared:
                kernels.reshard_blocks(
                    source,
                    target,
                    num_tokens=num_tokens,
                    source_head=shared[0] - theirs[0],
                    target_head=shared[0] - mine[0],
                    num_heads=len(shared),
                    num_layers=3,
                )
        assert torch.equal(target, blocks_of(expected, size_to, -1.0)), "and nothing else is touched"


def test_stages_are_ranges_of_layers_and_dtypes_are_converted() -> None:
    tokens = chain(20, 4, 2, 8)
    source, target = blocks_of(tokens, 16), torch.zeros(2, 2, 2, 2, 16, 8, dtype=torch.bfloat16)
    kernels.reshard_blocks(
        source, target, num_tokens=20, num_heads=2, source_layer=1, target_layer=0, num_layers=2
    )
    assert torch.equal(target, blocks_of(tokens[:, 1:3], 16, 0.0).bfloat16())


def fold(block: torch.Tensor) -> int:
    """The checksum of one block by its definition, in Python's whole numbers."""
    whole, total = 1 << 64, 0
    for i, word in enumerate(block.flatten().view(torch.int64).tolist()):
        mixed = word % whole ^ (i + 1) * 0x9E3779B97F4A7C15 % whole
        mixed = (mixed ^ mixed >> 33) * 0xFF51AFD7ED558CCD % whole
        mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 % whole
        total += mixed ^ mixed >> 33
    return (total + (1 << 63)) % whole - (1 << 63)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_checksums_of_what_was_moved(form: ModuleType, dtype: torch.dtype) -> None:
    pool = torch.randn(9, 2, 2, 2, 8, 6).to(dtype)
    ids, sums = torch.tensor([7, 0, 3]), torch.zeros(3, dtype=torch.int64)
    staged = form.gather_blocks(pool, ids, checksums=sums)
    assert sums.tolist() == [fold(block) for block in staged]
    assert torch.equal(form.block_checksums(staged), sums)
    arrived = torch.zeros(3, dtype=torch.int64)
    form.scatter_blocks(staged, pool, ids, checksums=arrived)
    assert torch.equal(arrived, sums)


@given(st.integers(0, 127), st.integers(0, 63), st.integers(0, 127), st.integers(0, 63))
def test_a_changed_block_has_another_checksum(word: int, bit: int, other: int, other_bit: int) -> None:
    block = torch.randint(-(2**63), 2**63 - 1, (1, 128))
    changed = block.clone()
    changed[0, word] ^= 1 << bit if bit < 63 else -(2**63)
    if (word, bit) != (other, other_bit):
        changed[0, other] ^= 1 << other_bit if other_bit < 63 else -(2**63)
    assert kernels.block_checksums(changed) != kernels.block_checksums(block)
    assert kernels.block_checksums(block.flip(1)) != kernels.block_checksums(block)
