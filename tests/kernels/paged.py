"""Paged sequences for tests of attention, with the expected results in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.kernels import reference
from moonpool.kernels.reference import to_pool_dtype

# Largest error allowed, relative to the largest value expected; a result in 16 bits is rounded once.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


@dataclass(frozen=True)
class Shape:
    """One batch. lens: (new, total) tokens of each sequence."""

    lens: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    dtype: torch.dtype = torch.float32
    layers: int = 2
    layer: int = 1
    kv_dtype: torch.dtype | None = None  # None: dtype
    k_scale: float = 1.0
    v_scale: float = 1.0


class PagedBatch:
    """Sequences scattered over a pool whose every unused slot, layer and block holds NaN.

    Blocks wholly before what a sequence's queries can see are left out of its table, as -1.
    """

    def __init__(self, shape: Shape, seed: int = 0, device: str = "cpu") -> None:
        """Made on the CPU, so that a seed gives the same batch everywhere, then taken to ``device``."""
        with torch.device("cpu"):
            self._make(shape, seed)
        for name in ("pool", "block_table", "q", "cu_seqlens_q", "context_lens"):
            setattr(self, name, getattr(self, name).to(device))

    def _make(self, shape: Shape, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        size, dim = shape.block_size, shape.head_dim
        counts = [-(-total // size) for _, total in shape.lens]
        num_blocks = sum(counts) + 3
        in_codes = shape.kv_dtype == torch.int8
        row = dim + 4 if in_codes else dim
        pool_shape = (num_blocks, shape.layers, 2, shape.num_kv_heads, size, row)
        if in_codes:
            self.pool = torch.full(pool_shape, 77, dtype=torch.int8)
            reference.codes_and_scales(self.pool)[1].fill_(float("nan"))
        else:
            self.pool = torch.full(pool_shape, float("nan"), dtype=shape.kv_dtype or shape.dtype)
        free = torch.randperm(num_blocks, generator=generator).to(torch.int32).tolist()
        self.block_table = torch.full((len(counts), max(counts, default=0) + 2), -1, dtype=torch.int32)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        queries = [torch.empty(0, shape.num_heads, dim, dtype=shape.dtype)]
        for i, (new, total) in enumerate(shape.lens):
            k, v = torch.randn(2, total, shape.num_kv_heads, dim, generator=generator).unbind(0)
            if not in_codes:
                k = to_pool_dtype(k, shape.k_scale, self.pool.dtype)
                v = to_pool_dtype(v, shape.v_scale, self.pool.dtype)
            stored = []  # codes, and what they stand for
            for x in (k, v) if in_codes else ():
                codes, scales = reference.to_codes(x)
                stored.append((codes, scales, codes.float() * scales[..., None]))
            first_seen = max(0, total - new - shape.window + 1) if shape.window and new else 0
            for block in range(first_seen // size, counts[i]):
                place = free.pop()
                self.block_table[i, block] = place
                tokens = slice(block * size, min(total, (block + 1) * size))
                length = tokens.stop - tokens.start
                if in_codes:
                    everywhere = reference.codes_and_scales(self.pool)
                    for component, found in enumerate(stored):
                        for part, of_tokens in zip(everywhere, found, strict=False):
                            at = part[place, shape.layer, component, :, :length]
                            at.copy_(of_tokens[tokens].transpose(0, 1))
                    continue
                self.pool[place, shape.layer, 0, :, :length] = k[tokens].transpose(0, 1)
                self.pool[place, shape.layer, 1, :, :length] = v[tokens].transpose(0, 1)
            if in_codes:
                k, v = (numbers for _, _, numbers in stored)
            self.keys.append(k.double() * shape.k_scale)
            self.values.append(v.double() * shape.v_scale)
            queries.append(torch.randn(new, shape.num_heads, dim, generator=generator).to(shape.dtype))
        self.q = torch.cat(queries)
        starts = [0]
        for new, _ in shape.lens:
            starts.append(starts[-1] + new)
        self.cu_seqlens_q = torch.tensor(starts, dtype=torch.int32)
        self.context_lens = torch.tensor([total for _, total in shape.lens], dtype=torch.int32)

    @property
    def rules(self) -> dict[str, float | int]:
        shape = self.shape
        rules = {"scale": shape.head_dim**-0.5, "window": shape.window, "soft_cap": shape.soft_cap}
        return rules | {"k_scale": shape.k_scale, "v_scale": shape.v_scale}

    def expected(self) -> Tensor:
        """float64 [num_tokens, num_heads, head_dim], straight from the definition of attention."""
        return self.expected_states()[0]

    def expected_states(self) -> tuple[Tensor, Tensor]:
        """That, and the logarithms of the sums of exponentials: [num_tokens, num_heads]."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        out = torch.empty(self.q.shape, dtype=torch.float64, device="cpu")
        lse = torch.empty(self.q.shape[:-1], dtype=torch.float64, device="cpu")
        queries = self.q.cpu().double()
        row = 0
        for (new, total), k, v in zip(shape.lens, self.keys, self.values, strict=True):
            for position in range(total - new, total):
                first = max(0, position - shape.window + 1) if shape.window else 0
                # Keys and values [tokens, KV heads, head_dim]; a KV head has a group of queries.
                keys, values = k[first : position + 1], v[first : position + 1]
                of_groups = queries[row].view(shape.num_kv_heads, group, shape.head_dim)
                scores = torch.einsum("tkd,kgd->kgt", keys, of_groups) * shape.head_dim**-0.5
                if shape.soft_cap:
                    scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
                out[row] = torch.einsum("kgt,tkd->kgd", torch.softmax(scores, -1), values).flatten(0, 1)
                lse[row] = scores.logsumexp(-1).flatten()
                row += 1
        return out, lse


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """NaN-free and within the dtype's tolerance of the largest value expected."""
    actual, expected = actual.cpu(), expected.cpu()
    assert not actual.isnan().any()
    error = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    largest = max(1.0, expected.abs().max().item()) if actual.numel() else 1.0
    assert error <= factor * TOLERANCE[dtype] * largest, f"off by {error:.3g} of {largest:.3g}"
