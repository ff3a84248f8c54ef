"""Which cases are measured: a small set on a CPU, the sweep on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from moonpool.bench.kernels import goals, peers
from moonpool.bench.kernels.attention import Decode, Heads, Prefill
from moonpool.bench.kernels.device_limits import Machine
from moonpool.bench.kernels.model_step import llama_rows, shipped_row
from moonpool.kernels.reference import FP8
from moonpool.runtime.reports.report import Row, versus

F32, BF16 = torch.float32, torch.bfloat16
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (512, 2048, 4096, 8192, 32 << 10, 128 << 10)
GROUPS, HEAD_DIMS, BLOCK_SIZES = (1, 4, 8), (64, 128), (16, 64, 256)
# The points at which heads and blocks of other shapes are measured.
POINTS = ((1, 128 << 10), (32, 4096), (128, 4096))


def step_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    if machine.is_cuda:
        yield from llama_rows(machine)
        return
    for dtype, stored in ((F32, BF16), (F32, F32), (BF16, BF16))[: 1 if quick else 3]:
        for batch, limit_ms in ((1, 0.5), (8, 1.0)):
            # The bounds are for a checkpoint in bf16, as the shipped one is.
            yield shipped_row(machine, dtype, stored, batch, limit_ms if stored is BF16 else None)


def decode_cases(cuda: bool, quick: bool, full: bool) -> list[Decode]:
    if not cuda:
        shapes = ((8, 4, 32, 16), (16, 16, 64, 16), (32, 8, 128, 16), (32, 8, 128, 64))
        found = [
            Decode(Heads(*shape), dtype, pages, 8, 2048)
            for shape in shapes[: 1 if quick else 4]
            for dtype, pages in ((F32, F32), (BF16, BF16), (F32, FP8))
        ]
        if not quick:
            found += [Decode(Heads(32, 8, 128, 16), F32, F32, *at) for at in ((1, 512), (1, 8192), (8, 512))]
            found += [Decode(Heads(32, 8, 128, 16), F32, F32, 8, 2048, queries=4)]
        return found
    if full:
        every = list(product(GROUPS, HEAD_DIMS, BLOCK_SIZES))
        return [
            Decode(Heads(8 * group, 8, dim, size), BF16, pages, batch, context)
            for group, dim, size in every
            for batch, context in product(BATCHES, CONTEXTS)
            for pages in (BF16, FP8)
        ]
    centre = Heads(32, 8, 128, 16)
    grid = ((32, 4096),) if quick else tuple(product(BATCHES, CONTEXTS))
    found = [Decode(centre, BF16, pages, *at) for at in grid for pages in (BF16, FP8)]
    if not quick:
        for group, dim, size in product(GROUPS, HEAD_DIMS, BLOCK_SIZES):
            if (group, dim, size) != (4, 128, 16):
                heads = Heads(8 * group, 8, dim, size)
                found += [Decode(heads, BF16, pages, *at) for at in POINTS for pages in (BF16, FP8)]
        found += [Decode(centre, BF16, pages, 32, 4096, queries=4) for pages in (BF16, FP8)]
    return found


def decode_rows(machine: Machine, quick: bool, full: bool) -> Iterator[Row]:
    """Peers beside the shape at the centre; float8 pages beside their own 16-bit ones."""
    halves: dict[tuple[Heads, int, int, int], float] = {}
    here = peers.peers_here(machine.is_cuda)
    for case in decode_cases(machine.is_cuda, quick, full):
        central = case.heads == Heads(32, 8, 128, 16) or not machine.is_cuda
        asked: tuple[str, ...] = here if central else ()
        if machine.is_cuda and central:
            # What has to be compiled for each shape, or doubles the pool, at a few points only.
            few = (case.batch, case.context) in POINTS
            asked = (*asked, peers.LAYER_MAJOR) if few else tuple(n for n in asked if n != peers.FLEX)
        at = (case.heads, case.batch, case.context, case.queries)
        for row in case.rows(machine, asked):
            yield row
            if row.metric != "rate" or row.peer not in ("large copy", "large read"):
                continue
            if case.pages == machine.dtype:
                halves[at] = row.value
            elif case.pages == FP8 and at in halves:
                goal = goals.FP8_OF_HALF if machine.is_cuda else None
                beside = Row(row.case, "rate", row.value, row.unit, **goals.at_least(goal))
                yield versus(beside, "pages as wide as q", halves[at])


def prefill_rows(machine: Machine, quick: bool, full: bool) -> Iterator[Row]:
    here = peers.peers_here(machine.is_cuda)
    if not machine.is_cuda:
        for shape in ((8, 4, 32, 16), (32, 8, 128, 16))[: 1 if quick else 2]:
            for dtype in (F32, BF16):
                for lens in ((512, 512), (512, 2048))[: 1 if quick else 2]:
                    yield from Prefill(Heads(*shape), dtype, dtype, *lens).rows(machine, here)
        return
    lengths: tuple[tuple[int, int], ...] = ((8192, 8192),)
    if not quick:
        lengths = tuple((n, n) for n in (512, 2048, 8192, 32 << 10))
        lengths += ((2048, 32 << 10), (2048, 128 << 10))
    groups, dims, sizes = (GROUPS, HEAD_DIMS, BLOCK_SIZES) if full else ((4,), HEAD_DIMS, (16,))
    for group, dim, size in product(groups, dims, sizes):
        heads = Heads(8 * group, 8, dim, size)
        for pages in (BF16, FP8):
            for new, context in lengths:
                yield from Prefill(heads, BF16, pages, new, context).rows(machine, here)
