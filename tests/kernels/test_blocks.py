"""Whole blocks between the pool and elsewhere, and the merge of attentions over parts."""

from __future__ import annotations

import torch

import kernels
from kernels import reference
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


def test_copy_blocks() -> None:
    pool = torch.randn(9, 1, 2, 1, 8, 16).half()
    before = pool.clone()
    kernels.copy_blocks(pool, torch.tensor([1, 1, 2]), torch.tensor([8, 7, 0]))
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
