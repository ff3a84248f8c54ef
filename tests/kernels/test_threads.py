"""Several threads: the same bits as one, after a fork and with several callers too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.kernels import dispatch
from moonpool.kernels.cpu.library import load
from moonpool.kernels.packed import PackedExperts, PackedLinear
from moonpool.kernels.quantised import QuantisedLinear
from moonpool.kernels.threads import get_num_threads, set_num_threads
from tests.kernels.test_quantised import random_weight

pytestmark = pytest.mark.skipif(load() is None, reason="no compiler here")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK, KV_HEADS, HEADS, DIM = 16, 2, 4, 64


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = get_num_threads()
    yield
    set_num_threads(before)


def products(rows: int, dtype: torch.dtype, stored: torch.dtype) -> Callable[[], Tensor]:
    linear = PackedLinear(torch.randn(1000, 515).to(stored), torch.randn(1000), dtype)
    x = torch.randn(rows, 515).to(dtype)
    return lambda: linear(x)


def quantised(rows: int, dtype: torch.dtype, kind: str) -> Callable[[], Tensor]:
    linear = QuantisedLinear(random_weight(kind, 1000, 515, 64), torch.randn(1000))
    x = torch.randn(rows, 515).to(dtype)
    return lambda: linear(x)


def experts(dtype: torch.dtype) -> Callable[[], Tensor]:
    packed = PackedExperts(torch.randn(5, 700, 256).to(dtype))
    x, offsets = torch.randn(300, 256).to(dtype), torch.tensor([0, 0, 40, 41, 200, 290], dtype=torch.int32)
    return lambda: packed(x, offsets)


def attention(dtype: torch.dtype, lens: list[int], new: list[int]) -> Callable[[], Tensor]:
    """Prefill of ``new`` tokens of each sequence; empty: decode of one token each."""
    blocks = [-(-n // BLOCK) for n in lens]
    pool = torch.randn(sum(blocks), 1, 2, KV_HEADS, BLOCK, DIM).to(dtype)
    table = torch.full((len(lens), max(blocks)), -1, dtype=torch.int32)
    free = iter(torch.randperm(sum(blocks)).tolist())
    for i, num in enumerate(blocks):
        table[i, :num] = torch.tensor([next(free) for _ in range(num)])
    contexts = torch.tensor(lens, dtype=torch.int32)
    q = torch.randn(sum(new) or len(lens), HEADS, DIM).to(dtype)
    scale = DIM**-0.5
    if not new:
        return lambda: dispatch.paged_decode_attention(q, pool, 0, table, contexts, scale=scale)
    starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0).int()
    return lambda: dispatch.paged_prefill_attention(q, pool, 0, table, starts, contexts, scale=scale)


def rotation(dtype: torch.dtype) -> Callable[[], Tensor]:
    n = 700
    qkv = torch.randn(n, (HEADS + 2 * KV_HEADS) * DIM).to(dtype)
    angles = torch.randn(n, DIM // 2)
    positions, slots = torch.arange(n), torch.randperm(n + 4)[:n]
    norm = torch.randn(DIM).to(dtype)

    def call() -> Tensor:
        pool = torch.zeros(-(-(n + 4) // BLOCK), 1, 2, KV_HEADS, BLOCK, DIM, dtype=dtype)
        q = dispatch.rotate_and_write(
            qkv, positions, angles.cos(), angles.sin(), pool, 0, slots,
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, q_norm=norm, k_norm=norm,
        )  # fmt: skip
        return torch.cat((q.flatten(), pool.flatten()))

    return call


def rows(operation: Callable[..., Any], *args: Any) -> Callable[[], Tensor]:
    def call() -> Tensor:
        out = operation(*args)
        return torch.cat(out) if isinstance(out, tuple) else out

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 1024).to(dtype)
    calls: list[Callable[[], Tensor]] = [
        *(products(n, dtype, dtype) for n in (1, 8, 60, 700)),
        *(products(n, torch.float32, torch.bfloat16) for n in (1, 700)),
        *(quantised(n, dtype, kind) for n in (1, 700) for kind in ("int8", "int4", "fp8")),
        experts(dtype),
        attention(dtype, [4000], []),
        attention(dtype, [700, 3, 1500, 1, 900], []),
        attention(dtype, [500, 3, 900], [300, 3, 700]),
        rotation(dtype),
        rows(dispatch.silu_mul, x),
        rows(dispatch.argmax_rows, x),
        rows(dispatch.rms_norm, x, x[0], 1e-6),
        lambda: torch.cat(dispatch.rms_norm(x, x[0], 1e-6, residual=x.flip(0))),
    ]
    set_num_threads(1)
    alone = [call() for call in calls]
    for num_threads in (2, 5):
        set_num_threads(num_threads)
        assert get_num_threads() == num_threads
        for i, (call, expected) in enumerate(zip(calls, alone, strict=True)):
            assert torch.equal(call(), expected), i


def test_several_callers_and_a_changing_number_of_threads() -> None:
    call = products(200, torch.float32, torch.bfloat16)
    expected = call()
    with ThreadPoolExecutor(4) as callers:
        results = [callers.submit(call) for _ in range(200)]
        for num_threads in (3, 1, 4, 2):
            set_num_threads(num_threads)
        assert all(torch.equal(result.result(), expected) for result in results)


def test_a_fork_computes_on_threads_of_its_own() -> None:
    call = products(200, torch.float32, torch.bfloat16)
    set_num_threads(3)
    expected = call()
    child = os.fork()
    if child == 0:
        ok = get_num_threads() == 1 and torch.equal(call(), expected)
        set_num_threads(3)
        os._exit(0 if ok and torch.equal(call(), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
