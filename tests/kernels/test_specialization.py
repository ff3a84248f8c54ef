"""Triton compiles a kernel anew for each form of its arguments: the steps of a model must all have one form.

The forms are Triton's own: its function makes the key of a launch that is noted instead of made.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from moonpool.kernels.triton import adapters, decode, experts, kv, merge, prefill, quantised, rows
from moonpool.kernels.triton.fp8 import BITWISE, NATIVE

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 6, 2, 64, 16
BF16 = torch.bfloat16
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The forms of each kernel's launches."""
    found: dict[str, set[str]] = {}

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **words: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        found.setdefault(kernel.__name__, set()).add(str(bind(*args, **words)[1]))

    monkeypatch.setattr(JITFunction, "run", note)
    return found


def aligned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """As CUDA allocates: at a multiple of 256 bytes."""
    nbytes = dtype.itemsize * int(torch.tensor(shape).prod())
    memory = torch.zeros(nbytes + 256, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + nbytes].view(dtype).view(shape)


def step(num_decodes: int, num_tokens: int, width: int, *, sinks: bool) -> None:
    """The launches of a layer for a step of so many decodes and a chunk, as ``Attention`` makes them."""
    n = num_decodes + num_tokens
    pool = aligned(64, 2, 2, KV_HEADS, BLOCK_SIZE, DIM, dtype=BF16)
    # One upload has token ids, positions and slots.
    _, positions, slots = aligned(3, n, dtype=torch.int64)
    qkv = aligned(n, (HEADS + 2 * KV_HEADS) * DIM, dtype=BF16)
    angles = aligned(64, DIM // 2, dtype=torch.float32)
    words: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    for layer in (0, 1):
        kv.rotate_and_write(qkv, positions, angles, angles, pool, layer, slots, **words)
        k = aligned(n, KV_HEADS, DIM, dtype=BF16)
        kv.write_kv(k, k, pool, layer, slots)
        q, out = aligned(2, n, HEADS, DIM, dtype=BF16)
        lse = aligned(n, HEADS, dtype=torch.float32) if sinks else None
        at = num_decodes
        of_decodes, of_chunks = (None, None) if lse is None else (lse[:at], lse[at:])
        table, lens = aligned(64, 40, dtype=torch.int32), aligned(64, dtype=torch.int32)
        decode.paged_decode_attention(
            q[:at], pool, layer, table[:at, :width], lens[:at], scale=0.1, out=out[:at], lse=of_decodes
        )
        chunk = aligned(1, width, dtype=torch.int32)
        starts, lens = aligned(2, dtype=torch.int32), aligned(1, dtype=torch.int32)
        prefill.paged_prefill_attention(
            q[at:], pool, layer, chunk, starts, lens, scale=0.1, out=out[at:], lse=of_chunks
        )
    hidden = aligned(n, 384, dtype=BF16)
    rows.rms_norm(hidden, aligned(384, dtype=BF16), 1e-5, residual=hidden)
    rows.silu_mul(aligned(n, 512, dtype=BF16))
    states = aligned(3, n, HEADS, DIM, dtype=BF16)
    merge.merge_attention_states(states, aligned(3, n, HEADS, dtype=torch.float32))
    ids = aligned(n + 1, dtype=torch.int32)[1:]
    extents, lines = (aligned(6, dtype=torch.int32)[2:].view(2, 2) for _ in range(2))
    adapters.add_lora(hidden, hidden, aligned(6144, dtype=BF16), ids, extents, lines, 8)


@pytest.mark.parametrize("sinks", [False, True])
def test_all_steps_of_a_model_have_one_form(forms: dict[str, set[str]], sinks: bool) -> None:
    for num_decodes in (1, 3, 16):
        for num_tokens in (1, 5, 16):
            for width in (1, 16, 17):
                step(num_decodes, num_tokens, width, sinks=sinks)
    several = {name: found for name, found in forms.items() if len(found) > 1}
    # Whether a context can be split does not change the code, but a merge follows.
    assert not several, "\n".join(f"{name}: {form}" for name, found in several.items() for form in found)
    assert len(forms) >= 8


def test_experts_have_a_form_for_few_rows_and_one_for_many(forms: dict[str, set[str]]) -> None:
    weights = aligned(4, 64, 64, dtype=BF16)
    for n in (1, 2, 3, 64, 128, 129, 500):
        experts.grouped_matmul(aligned(n, 64, dtype=BF16), weights, aligned(5, dtype=torch.int32))
    assert {name: len(found) for name, found in forms.items()} == {"grouped_tile": 2}


def test_products_in_few_bits_have_a_form_for_few_rows_and_one_for_many(forms: dict[str, set[str]]) -> None:
    codes, scales = aligned(64, 128, dtype=torch.uint8), aligned(64, 1, dtype=torch.float32)
    for n in (1, 2, 3, 16, 17, 64, 128, 129, 500):
        x = aligned(n, 128, dtype=BF16)
        quantised.quantised_matmul(x, codes, scales, None, kind="int8", group=128)
    assert {name: len(found) for name, found in forms.items()} == {"quantised_tile": 2}


@pytest.mark.parametrize(("capability", "mode"), [((8, 6), BITWISE), ((8, 9), NATIVE)])
def test_products_in_float8_convert_as_the_gpu_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], mode: int
) -> None:
    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **words: launches.append(words))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    # A GPU that no machine has: what is kept of its architecture is of no use to another test.
    with FakeTensorMode(), torch.device(f"cuda:{50 + capability[1]}"):
        codes, scales = torch.empty(64, 128, dtype=torch.uint8), torch.empty(64, 1)
        x = torch.empty(5, 128, dtype=BF16)
        quantised.quantised_matmul(x, codes, scales, None, kind="fp8", group=128)
    assert [words["FP8_MODE"] for words in launches] == [mode]
