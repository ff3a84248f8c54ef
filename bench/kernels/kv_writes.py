"""Writes of K and V into the pool, and merges of attention over parts of a context."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moonpool.bench.kernels.attention import SCALE, Heads, scales_of
from moonpool.bench.kernels.contest import contest
from moonpool.bench.kernels.device_limits import Machine, name_of
from moonpool.kernels import reference
from moonpool.kernels.dispatch import merge_attention_states, rotate_and_write, write_kv
from moonpool.kernels.reference import FP8
from moonpool.runtime.reports.report import Row


def write_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    heads = Heads(32, 8, 128, 16) if machine.is_cuda else Heads(8, 4, 32, 16)
    for pages in (machine.dtype, FP8):
        for n in (64, 8192)[: 1 if quick else 2]:
            yield from _written(machine, heads, pages, n)


def _written(machine: Machine, heads: Heads, pages: torch.dtype, n: int) -> Iterator[Row]:
    device, dtype, dim, kv_heads = machine.device, machine.dtype, heads.head_dim, heads.num_kv_heads
    token_nbytes = heads.token_nbytes(dtype) + heads.token_nbytes(pages)
    layers = max(2, min(256, -(-machine.cold_nbytes // (n * heads.token_nbytes(pages)))))
    blocks = -(-n // heads.block_size)
    pool = heads.pool(blocks, layers, pages, device)
    slots = torch.randperm(blocks * heads.block_size, device=device)[:n]
    sources = max(2, min(64, -(-machine.cold_nbytes // (n * token_nbytes))))
    k, v = torch.randn(2, sources, n, kv_heads, dim, device=device).to(dtype).unbind(0)
    scales = scales_of(pages)

    def write() -> None:
        for i in range(layers):
            write_kv(k[i % sources], v[i % sources], pool, i, slots, **scales)

    def written() -> tuple[Tensor, Tensor]:
        write_kv(k[0], v[0], pool, 0, slots, **scales)
        found = pool[slots // heads.block_size, 0, 1, :, slots % heads.block_size].float()
        return found, reference.to_pool_dtype(v[0], SCALE, pages).float()

    case = f"{heads.name}, {name_of(dtype)} to {name_of(pages)}, {n} tokens"
    yield from contest(
        machine, f"write_kv {case}", write, calls=layers, amount=n * token_nbytes, limit="copy", error=written
    )
    qkv = torch.randn(sources, n, (heads.num_heads + 2 * kv_heads) * dim, device=device).to(dtype)
    angles = torch.rand(n, dim // 2, device=device)
    cos, sin, positions = angles.cos(), angles.sin(), torch.arange(n, device=device)

    def rotated(source: Tensor, layer: int) -> Tensor:
        return rotate_and_write(
            source, positions, cos, sin, pool, layer, slots, num_heads=heads.num_heads,
            num_kv_heads=kv_heads, head_dim=dim, **scales,
        )  # fmt: skip

    def error() -> tuple[Tensor, Tensor]:
        q = qkv[0].view(n, -1, dim)[:, : heads.num_heads]
        return rotated(qkv[0], 0), reference.rotate(q.double(), cos, sin)

    nbytes = n * (token_nbytes + 2 * heads.num_heads * dim * dtype.itemsize)
    rotate = lambda: [rotated(qkv[i % sources], i) for i in range(layers)]  # noqa: E731
    yield from contest(
        machine, f"rotate_and_write {case}", rotate, calls=layers, amount=nbytes, limit="copy", error=error
    )


def merge_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    for n in (64,) if quick or not machine.is_cuda else (64, 8192):
        yield from _merged(machine, n)


def _merged(machine: Machine, n: int) -> Iterator[Row]:
    parts, heads, dim = 4, 32, 128
    nbytes = (parts + 1) * n * heads * (dim * machine.dtype.itemsize + 4)
    copies = max(1, min(64, -(-machine.cold_nbytes // nbytes)))
    outs = torch.randn(copies, parts, n, heads, dim, device=machine.device).to(machine.dtype)
    lses = torch.randn(copies, parts, n, heads, device=machine.device)

    def error() -> tuple[Tensor, Tensor]:
        expected, _ = reference.merge_attention_states(outs[0].double(), lses[0])
        return merge_attention_states(outs[0], lses[0])[0], expected

    merge = lambda: [merge_attention_states(*of) for of in zip(outs, lses, strict=True)]  # noqa: E731
    case = f"merge {parts} parts of {n} tokens, {heads} heads of {dim}, {name_of(machine.dtype)}"
    yield from contest(machine, case, merge, calls=copies, amount=nbytes, limit="copy", error=error)
