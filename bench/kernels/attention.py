"""Attention: decode and prefill beside others, and their cases: a small set on a CPU, a sweep on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moonpool.bench.kernels import peers
from moonpool.bench.kernels.contest import contest, not_measured
from moonpool.bench.kernels.device_limits import BFLOAT16_MATMUL, Machine, Work, name_of
from moonpool.kernels import reference
from moonpool.kernels.dispatch import paged_decode_attention, paged_prefill_attention
from moonpool.kernels.reference import FP8
from moonpool.runtime.reports.report import Row, versus

# The same reads for one query of each sequence.
ONE_QUERY = "one query"
# Scale of float8 pages: no value of a normal distribution is cut off.
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
        """K and V of one layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize

    def pool(self, num_blocks: int, layers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = (num_blocks, layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
        pool = torch.empty(shape, dtype=dtype, device=device)
        for block in torch.split(pool, max(1, (256 << 20) // max(1, pool[0].nbytes))):
            values = torch.randn(block.shape, device=device)
            block.copy_(reference.to_pool_dtype(values, SCALE, dtype))
        return pool


def scales_of(pages: torch.dtype) -> dict[str, Any]:
    return {"k_scale": SCALE, "v_scale": SCALE} if pages == FP8 else {}


@dataclass(frozen=True)
class _Attention:
    heads: Heads
    dtype: torch.dtype
    pages: torch.dtype

    @property
    def _kinds(self) -> str:
        over = f" over {name_of(self.pages)}" if self.pages != self.dtype else ""
        return f"{self.heads.name}, {name_of(self.dtype)}{over}"

    @property
    def _options(self) -> dict[str, Any]:
        return {"scale": self.heads.head_dim**-0.5, **scales_of(self.pages)}


def _peer_works(
    case: str, names: list[str], make: Callable[[str], Work], works: dict[str, Work]
) -> Iterator[Row]:
    """Fill ``works`` with the peers that can do the case; a row for each that cannot."""
    for name in names:
        try:
            works[name] = make(name)
        # A foreign library raises anything for a shape that it has no kernel for.
        except Exception as error:
            yield not_measured(case, f"{name}: {str(error).splitlines()[0][:80]}")


@dataclass(frozen=True)
class Decode(_Attention):
    batch: int
    context: int
    queries: int = 1

    @property
    def case(self) -> str:
        several = f", {self.queries} queries" if self.queries > 1 else ""
        return f"decode {self._kinds}, batch {self.batch}, context {self.context}{several}"

    def rows(self, machine: Machine, asked: tuple[str, ...]) -> Iterator[Row]:
        heads, device, options = self.heads, machine.device, self._options
        per_sequence = -(-self.context // heads.block_size)
        blocks = self.batch * per_sequence
        layer_nbytes = blocks * heads.block_size * heads.token_nbytes(self.pages)
        layers = max(2, -(-machine.cold_nbytes // layer_nbytes))
        if layers * layer_nbytes > machine.free_nbytes and layer_nbytes >= machine.cold_nbytes:
            layers = 1
        if layers * layer_nbytes > machine.free_nbytes:
            why = f"its pages do not fit {machine.free_nbytes / 2**30:.0f} GiB"
            yield not_measured(self.case, why, layers * layer_nbytes / 2**30, "GiB")
            return
        pool = heads.pool(blocks, layers, self.pages, device)
        table = torch.randperm(blocks, device=device).to(torch.int32).view(self.batch, per_sequence)
        lens = torch.full((self.batch,), self.context, dtype=torch.int32, device=device)
        q = torch.randn((self.batch, self.queries, heads.num_heads, heads.head_dim), device=device)
        q = q.to(self.dtype)
        one = q[:, 0].contiguous()
        q = one if self.queries == 1 else q

        def over(pages: Tensor, asked_by: Tensor = q) -> Work:
            return lambda: [
                paged_decode_attention(asked_by, pages, i, table, lens, **options) for i in range(layers)
            ]

        def error() -> tuple[Tensor, Tensor]:
            few = min(2, self.batch)
            some, rest = q[:few].contiguous(), (pool, 0, table[:few], lens[:few])
            found = paged_decode_attention(some, *rest, **options)
            return found, reference.paged_decode_attention(some.double(), *rest, **options)

        works: dict[str, Work] = {ONE_QUERY: over(pool, one)} if self.queries > 1 else {}
        names = [name for name in asked if name != peers.LAYER_MAJOR]
        if names and self.pages != FP8 and self.queries == 1:
            if 2 * pool.nbytes > machine.free_nbytes:
                why = "a gathered copy for peers does not fit"
                yield not_measured(self.case, why, pool.nbytes / 2**30, "GiB")
            else:
                # Peers walk as many layers as ours.
                copies = [peers.dense(pool, i, table, self.context) for i in range(layers)]

                def make(name: str) -> Work:
                    if name == peers.FLASHINFER:
                        of_layers = [
                            peers.paged_decode_work(q, pool, i, table, self.context) for i in range(layers)
                        ]
                    else:
                        of_layers = [peers.dense_work(name, q[:, :, None], k, v, False) for k, v in copies]
                    return lambda: [work() for work in of_layers]

                yield from _peer_works(self.case, names, make, works)
        if peers.LAYER_MAJOR in asked and 2 * pool.nbytes < machine.free_nbytes:
            works[peers.LAYER_MAJOR] = over(pool.transpose(0, 1).contiguous().transpose(0, 1))
        nbytes = self.batch * self.context * heads.token_nbytes(self.pages)
        limit = "copy" if machine.is_cuda else "read"
        yield from contest(
            machine, self.case, over(pool), calls=layers, amount=nbytes, limit=limit, error=error,
            dtype=self.dtype, peers=works,
        )  # fmt: skip


@dataclass(frozen=True)
class Prefill(_Attention):
    new: int
    context: int

    @property
    def case(self) -> str:
        return f"prefill {self._kinds}, {self.new} new of {self.context}"

    def rows(self, machine: Machine, asked: tuple[str, ...]) -> Iterator[Row]:
        heads, device, options = self.heads, machine.device, self._options
        blocks = -(-self.context // heads.block_size)
        pool = heads.pool(blocks, 1, self.pages, device)
        table = torch.randperm(blocks, device=device).to(torch.int32).view(1, blocks)
        starts = torch.tensor([0, self.new], dtype=torch.int32, device=device)
        lens = torch.tensor([self.context], dtype=torch.int32, device=device)
        q = torch.randn(self.new, heads.num_heads, heads.head_dim, device=device).to(self.dtype)

        def ours() -> Tensor:
            return paged_prefill_attention(q, pool, 0, table, starts, lens, **options)

        def error() -> tuple[Tensor, Tensor]:
            # The last few queries attend over the whole context.
            few = min(8, self.new)
            some = torch.tensor([0, few], dtype=torch.int32, device=device)
            wide = q[-few:].double()
            return ours()[-few:], reference.paged_prefill_attention(
                wide, pool, 0, table, some, lens, **options
            )

        works: dict[str, Work] = {}
        if self.pages != FP8 and self.new == self.context:
            k, v = peers.dense(pool, 0, table, self.context)
            turned = q.transpose(0, 1)[None].contiguous()
            names = [name for name in asked if name != peers.LAYER_MAJOR]
            make = lambda name: peers.dense_work(name, turned, k, v, True)  # noqa: E731
            yield from _peer_works(self.case, names, make, works)
        pairs = self.new * self.context - self.new * (self.new - 1) / 2
        flops = 4 * heads.num_heads * heads.head_dim * pairs
        limit = "matmul" if self.dtype == machine.dtype else BFLOAT16_MATMUL
        yield from contest(
            machine, self.case, ours, calls=1, amount=flops, limit=limit, error=error,
            dtype=self.dtype, peers=works,
        )  # fmt: skip


F32, BF16 = torch.float32, torch.bfloat16
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (512, 2048, 4096, 8192, 32 << 10, 128 << 10)
GROUPS, HEAD_DIMS, BLOCK_SIZES = (1, 4, 8), (64, 128), (16, 64, 256)
_CENTRE = Heads(32, 8, 128, 16)
# (batch, context) of the cases with other heads and blocks than the centre's.
_POINTS = ((1, 128 << 10), (32, 4096), (128, 4096))
_QUERIES = (4, 8)


def decode_cases(cuda: bool, quick: bool) -> list[Decode]:
    if not cuda:
        shapes = (Heads(8, 4, 32, 16), Heads(16, 16, 64, 16), _CENTRE, Heads(32, 8, 128, 64))
        kinds = ((F32, F32), (BF16, BF16), (F32, FP8))
        found = [Decode(heads, *kind, 8, 2048) for heads in shapes[: 1 if quick else 4] for kind in kinds]
        if not quick:
            found += [Decode(_CENTRE, F32, F32, *at) for at in ((1, 512), (1, 8192), (8, 512))]
            several = (shapes[0], Heads(16, 8, 128, 16), _CENTRE)
            found += [
                Decode(heads, dtype, dtype, 8, 2048, queries=count)
                for heads, dtype, count in product(several, (F32, BF16), _QUERIES)
            ]
        return found
    every = [Heads(8 * group, 8, *of) for group, *of in product(GROUPS, HEAD_DIMS, BLOCK_SIZES)]
    grid = ((32, 4096),) if quick else tuple(product(BATCHES, CONTEXTS))
    found = [Decode(_CENTRE, BF16, pages, *at) for at, pages in product(grid, (BF16, FP8))]
    if not quick:
        others = [heads for heads in every if heads != _CENTRE]
        found += [
            Decode(heads, BF16, pages, *at) for heads, at, pages in product(others, _POINTS, (BF16, FP8))
        ]
        found += [
            Decode(_CENTRE, BF16, pages, 32, 4096, queries=count)
            for pages, count in product((BF16, FP8), _QUERIES)
        ]
    return found


def decode_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    """With peers at the centre; float8 pages also beside 16-bit ones."""
    halves: dict[tuple[Heads, int, int, int], float] = {}
    here = peers.peers_here(machine.is_cuda)
    for case in decode_cases(machine.is_cuda, quick):
        asked = here if case.heads == _CENTRE or not machine.is_cuda else ()
        if machine.is_cuda and asked and (case.batch, case.context) in _POINTS:
            asked = (*asked, peers.LAYER_MAJOR)  # it doubles the pool
        at = (case.heads, case.batch, case.context, case.queries)
        for row in case.rows(machine, asked):
            yield row
            if row.metric != "rate" or row.peer not in ("large copy", "large read"):
                continue
            if case.pages == machine.dtype:
                halves[at] = row.value
            elif case.pages == FP8 and at in halves:
                yield versus(Row(row.case, "rate", row.value, row.unit), "pages as wide as q", halves[at])


def prefill_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    here = peers.peers_here(machine.is_cuda)
    lengths: tuple[tuple[int, int], ...] = ((512, 512), (512, 2048))
    if not machine.is_cuda:
        shapes = (Heads(8, 4, 32, 16), _CENTRE)
        number = 1 if quick else 2
        for heads, dtype, of in product(shapes[:number], (F32, BF16), lengths[:number]):
            yield from Prefill(heads, dtype, dtype, *of).rows(machine, here)
        return
    lengths = ((8192, 8192),)
    if not quick:
        lengths = tuple((n, n) for n in (512, 2048, 8192, 32 << 10))
        lengths += ((2048, 32 << 10), (2048, 128 << 10))
    for dim, pages, of in product(HEAD_DIMS, (BF16, FP8), lengths):
        yield from Prefill(Heads(32, 8, dim, 16), BF16, pages, *of).rows(machine, here)
