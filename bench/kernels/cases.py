"""The cases of attention: a small set on a CPU, a sweep on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from moonpool.bench.kernels import peers
from moonpool.bench.kernels.attention import Decode, Heads, Prefill
from moonpool.bench.kernels.device_limits import Machine
from moonpool.kernels.reference import FP8
from moonpool.runtime.reports.report import Row, versus

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
