"""Attention: decode over a sweep of batches and contexts, and prefill of whole prompts and of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moonpool.bench.kernels import goals, peers
from moonpool.bench.kernels.clock import Work
from moonpool.bench.kernels.contest import Contest, not_measured
from moonpool.bench.kernels.device_limits import Machine, name_of
from moonpool.kernels import paged_decode_attention, paged_prefill_attention, reference
from moonpool.kernels.reference import FP8
from moonpool.runtime.reports.report import Row

# Scales of float8 pages: of values from a normal distribution, none is cut off.
SCALE = 0.02


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def name(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, blocks of {self.block_size}"

    def token_nbytes(self, dtype: torch.dtype) -> int:
        """Of one layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize

    def pool(self, num_blocks: int, layers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = (num_blocks, layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
        pool = torch.empty(shape, dtype=dtype, device=device)
        for block in torch.split(pool, max(1, (256 << 20) // max(1, pool[0].nbytes))):
            values = torch.randn(block.shape, device=device)
            block.copy_(reference.to_pool_dtype(values, SCALE, dtype))
        return pool


def _scales(dtype: torch.dtype) -> dict[str, Any]:
    return {"k_scale": SCALE, "v_scale": SCALE} if dtype == FP8 else {}


@dataclass(frozen=True)
class Decode:
    heads: Heads
    dtype: torch.dtype
    pages: torch.dtype
    batch: int
    context: int
    queries: int = 1

    @property
    def case(self) -> str:
        kinds = name_of(self.dtype) + (f" over {name_of(self.pages)}" if self.pages != self.dtype else "")
        several = f", {self.queries} queries" if self.queries > 1 else ""
        return f"decode {self.heads.name}, {kinds}, batch {self.batch}, context {self.context}{several}"

    @property
    def nbytes(self) -> int:
        """Of K and V that one call reads."""
        return self.batch * self.context * self.heads.token_nbytes(self.pages)

    def rows(self, machine: Machine, asked: tuple[str, ...]) -> Iterator[Row]:
        heads, device = self.heads, machine.device
        per_sequence = -(-self.context // heads.block_size)
        blocks = self.batch * per_sequence
        layer_nbytes = blocks * heads.block_size * heads.token_nbytes(self.pages)
        layers = max(2, -(-machine.cold_nbytes // layer_nbytes))
        if layers * layer_nbytes > machine.free_nbytes:
            layers = 1 if layer_nbytes >= machine.cold_nbytes else layers
        if layers * layer_nbytes > machine.free_nbytes:
            why = f"its pages do not fit {machine.free_nbytes / 2**30:.0f} GiB"
            yield not_measured(self.case, why, layers * layer_nbytes / 2**30, "GiB")
            return
        pool = heads.pool(blocks, layers, self.pages, device)
        table = torch.randperm(blocks, device=device).to(torch.int32).view(self.batch, per_sequence)
        lens = torch.full((self.batch,), self.context, dtype=torch.int32, device=device)
        shape = (self.batch, self.queries, heads.num_heads, heads.head_dim)
        q = torch.randn(shape, device=device).to(self.dtype)
        q = q[:, 0].contiguous() if self.queries == 1 else q
        scale, scales = heads.head_dim**-0.5, _scales(self.pages)

        def over(pages: Tensor) -> Work:
            return lambda: [
                paged_decode_attention(q, pages, i, table, lens, scale=scale, **scales) for i in range(layers)
            ]

        def error() -> tuple[Tensor, Tensor]:
            few = min(2, self.batch)
            given = (q[:few].contiguous(), pool, 0, table[:few], lens[:few])
            found = paged_decode_attention(*given, scale=scale, **scales)
            wide = (given[0].double(), *given[1:])
            return found, reference.paged_decode_attention(*wide, scale=scale, **scales)

        others, said = self._others(machine, asked, q, pool, table, layers)
        yield from said
        if peers.LAYER_MAJOR in asked and 2 * pool.nbytes < machine.free_nbytes:
            major = pool.transpose(0, 1).contiguous().transpose(0, 1)
            others[peers.LAYER_MAJOR] = over(major)
        contest = Contest(
            self.case,
            over(pool),
            layers,
            self.nbytes,
            "copy" if machine.is_cuda else "read",
            self.dtype,
            error,
            others,
            goals.of_decode(machine.is_cuda, self.batch, self.context, self.pages != FP8),
            {peers.LAYER_MAJOR: goals.STRIDED_OF_LAYER_MAJOR},
        )
        yield from contest.rows(machine)

    def _others(
        self,
        machine: Machine,
        asked: tuple[str, ...],
        q: Tensor,
        pool: Tensor,
        table: Tensor,
        layers: int,
    ) -> tuple[dict[str, Work], list[Row]]:
        """Those asked that can do it, and a row for each that cannot. Of dense copies as many layers are
        walked as ours walks, if they fit."""
        found: dict[str, Work] = {}
        said: list[Row] = []
        wanted = [name for name in asked if name != peers.LAYER_MAJOR]
        if self.pages == FP8 or self.queries > 1 or not wanted:
            return found, said
        if 2 * pool.nbytes > machine.free_nbytes:
            why = "a gathered copy for peers does not fit"
            return found, [not_measured(self.case, why, pool.nbytes / 2**30, "GiB")]
        copies = [peers.dense(pool, i, table, self.context) for i in range(layers)]
        turned = q[:, :, None]
        for name in wanted:
            try:
                if name == peers.FLASHINFER:
                    works = [peers.paged_decode_work(q, pool, i, table, self.context) for i in range(layers)]
                else:
                    works = [peers.dense_work(name, turned, k, v, False) for k, v in copies]
            # Whatever a foreign library raises for a shape it has no kernel for becomes a row.
            except Exception as error:
                said.append(not_measured(self.case, f"{name}: {str(error).splitlines()[0][:80]}", 0.0, ""))
                continue
            found[name] = lambda works=works: [work() for work in works]  # type: ignore[misc]
        return found, said


@dataclass(frozen=True)
class Prefill:
    heads: Heads
    dtype: torch.dtype
    pages: torch.dtype
    new: int
    context: int

    @property
    def case(self) -> str:
        kinds = name_of(self.dtype) + (f" over {name_of(self.pages)}" if self.pages != self.dtype else "")
        return f"prefill {self.heads.name}, {kinds}, {self.new} new of {self.context}"

    def rows(self, machine: Machine, asked: tuple[str, ...]) -> Iterator[Row]:
        heads, device = self.heads, machine.device
        blocks = -(-self.context // heads.block_size)
        pool = heads.pool(blocks, 1, self.pages, device)
        table = torch.randperm(blocks, device=device).to(torch.int32).view(1, blocks)
        starts = torch.tensor([0, self.new], dtype=torch.int32, device=device)
        lens = torch.tensor([self.context], dtype=torch.int32, device=device)
        q = torch.randn(self.new, heads.num_heads, heads.head_dim, device=device).to(self.dtype)
        scale, scales = heads.head_dim**-0.5, _scales(self.pages)

        def error() -> tuple[Tensor, Tensor]:
            # The last few queries, which see the whole context.
            few = min(8, self.new)
            found = paged_prefill_attention(q, pool, 0, table, starts, lens, scale=scale, **scales)[-few:]
            some = torch.tensor([0, few], dtype=torch.int32, device=device)
            wide = q[-few:].double()
            return found, reference.paged_prefill_attention(
                wide, pool, 0, table, some, lens, scale=scale, **scales
            )

        others: dict[str, Work] = {}
        if self.pages != FP8 and self.new == self.context:
            k, v = peers.dense(pool, 0, table, self.context)
            turned = q.transpose(0, 1)[None].contiguous()
            for name in asked:
                if name == peers.LAYER_MAJOR:
                    continue
                try:
                    others[name] = peers.dense_work(name, turned, k, v, True)
                # Whatever a foreign library raises for a shape it has no kernel for becomes a row.
                except Exception as error_of:
                    yield not_measured(self.case, f"{name}: {str(error_of).splitlines()[0][:80]}", 0.0, "")
        pairs = self.new * self.context - self.new * (self.new - 1) / 2
        goal = goals.of_prefill(machine.is_cuda, heads.head_dim, self.new, self.context)
        contest = Contest(
            self.case,
            lambda: paged_prefill_attention(q, pool, 0, table, starts, lens, scale=scale, **scales),
            1,
            4 * heads.num_heads * heads.head_dim * pairs,
            "matmul",
            self.dtype,
            error,
            others,
            peer_goals={} if goal is None else {peers.CUDNN: goal},
        )
        yield from contest.rows(machine)
