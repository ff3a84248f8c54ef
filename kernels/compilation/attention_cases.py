"""Compilation cases of the attention kernels."""

# Triton is untyped.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moonpool.kernels.compilation.kernel_case import POINTERS, RULES, STRIDES, Case
from moonpool.kernels.reference import FP8
from moonpool.kernels.triton import decode as triton_decode
from moonpool.kernels.triton import prefill as triton_prefill
from moonpool.kernels.triton.fp8 import fp8_mode
from moonpool.kernels.triton.launch import decode_choice, padded, prefill_choice


@dataclass(frozen=True)
class AttentionCase:
    """Dtypes and shape that attention is compiled for."""

    q_dtype: torch.dtype
    pool_dtype: torch.dtype
    head_dim: int
    group: int = 4
    block_size: int = 16
    queries: int = 1
    capped: bool = False  # scores, as in Gemma 2
    writes_lse: bool = False  # for attention sinks and merges
    key_only: int = 0  # elements of a latent

    @property
    def name(self) -> str:
        kind = str(self.q_dtype).removeprefix("torch.")
        kind = {"float32": "wide", FP8: "fp8"}.get(kind, kind) if self.pool_dtype != FP8 else f"{kind}/fp8"
        several = f" Q{self.queries}" if self.queries > 1 else ""
        several += f" K{self.key_only}" if self.key_only else ""
        several += " capped" * self.capped + " lse" * self.writes_lse
        return f"{kind} D{self.head_dim} G{self.group} B{self.block_size}{several}"


def attention_cases() -> Iterator[AttentionCase]:
    """Every dtype and head_dim of the launch table, then other parameters that change the code."""
    for head_dim in (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float16):
            yield AttentionCase(dtype, dtype, head_dim)
        yield AttentionCase(torch.bfloat16, FP8, head_dim)
        yield AttentionCase(torch.float32, torch.float32, head_dim)
    for group, block_size in ((1, 16), (7, 16), (8, 256), (8, 64), (32, 64)):
        yield AttentionCase(torch.bfloat16, torch.bfloat16, 128, group, block_size)
        yield AttentionCase(torch.bfloat16, FP8, 128, group, block_size)
    yield AttentionCase(torch.bfloat16, FP8, 64, group=2)
    for pages in (torch.bfloat16, FP8):  # DeepSeek's latents
        yield AttentionCase(torch.bfloat16, pages, 576, group=16, block_size=64, key_only=64)
    yield AttentionCase(torch.bfloat16, torch.bfloat16, 256, group=2, capped=True)
    yield AttentionCase(torch.bfloat16, torch.bfloat16, 64, group=8, writes_lse=True)
    for queries in (4, 16):
        yield AttentionCase(torch.bfloat16, torch.bfloat16, 128, queries=queries)
        yield AttentionCase(torch.bfloat16, FP8, 128, queries=queries)


def decode_case(case: AttentionCase, arch: int, choice: Any = None) -> Case:
    """``choice`` overrides the launch table."""
    rows = padded(case.queries * case.group, 16)
    choice = choice or decode_choice(case.head_dim, rows, case.q_dtype, case.pool_dtype, arch)
    pointer = POINTERS[case.q_dtype]
    constants = triton_decode.decode_constants(
        queries=case.queries, group=case.group, head_dim=case.head_dim, batch=64, choice=choice,
        key_only=case.key_only,
    )  # fmt: skip
    return Case(
        f"decode {case.name}",
        triton_decode.decode_partition,
        {
            "q": pointer,
            "pool": POINTERS[case.pool_dtype],
            "out": pointer,
            **dict.fromkeys(("table", "contexts", "positions"), "*i32"),
            **dict.fromkeys(("lse", "scratch", "scratch_lse"), "*fp32"),
        },
        STRIDES | RULES | dict.fromkeys(("table_stride", "batch", "wanted"), "i32"),
        constants
        | {"ROWS": rows, "BLOCK_SIZE": case.block_size, "FP8": fp8_mode(case.pool_dtype, arch)}
        | {"CAPPED": case.capped, "WRITE_LSE": case.writes_lse}
        | {"REST_PADDED": padded(case.key_only, 16) if case.key_only else 1},
        choice.num_warps,
        choice.num_stages,
        multiplies_tiles=case.q_dtype != torch.float32,
        loads_nbytes=16,
        resident=choice.programs_per_multiprocessor,
    )


def prefill_case(case: AttentionCase, arch: int, choice: Any = None) -> Case:
    """``choice`` overrides the launch table."""
    choice = choice or prefill_choice(case.head_dim, case.q_dtype, case.pool_dtype, arch)
    pointer = POINTERS[case.q_dtype]
    constants = triton_prefill.prefill_constants(
        group=case.group, head_dim=case.head_dim, block_size=case.block_size, batch=64, choice=choice,
        key_only=case.key_only,
    )  # fmt: skip
    half = case.q_dtype != torch.float32
    return Case(
        f"prefill {case.name}",
        triton_prefill.prefill_tile,
        {
            "q": pointer,
            "pool": POINTERS[case.pool_dtype],
            "out": pointer,
            "lse": "*fp32",
            **dict.fromkeys(("table", "starts", "positions", "contexts"), "*i32"),
        },
        STRIDES | RULES | dict.fromkeys(("table_stride", "batch"), "i32"),
        constants
        | {"CAPPED": case.capped, "POSITIONS": False, "WRITE_LSE": case.writes_lse}
        | {"FP8": fp8_mode(case.pool_dtype, arch)},
        choice.num_warps,
        choice.num_stages,
        multiplies_tiles=half,
        multiplies_warpgroups=half and choice.rows >= 64,
        loads_nbytes=16,
    )
