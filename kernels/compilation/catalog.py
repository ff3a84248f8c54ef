"""The kernels that are compiled without a GPU, and their shapes: all kernels that are launched."""

# Triton is untyped.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Iterator

import torch

from moonpool.kernels.compilation.attention_cases import attention_cases, decode_case, prefill_case
from moonpool.kernels.compilation.kernel_case import POINTERS, STRIDES, Case
from moonpool.kernels.reference import FP8, LINE_NBYTES
from moonpool.kernels.reference.quantised import Kind
from moonpool.kernels.triton import adapters as triton_adapters
from moonpool.kernels.triton import checksums as triton_checksums
from moonpool.kernels.triton import decode as triton_decode
from moonpool.kernels.triton import experts as triton_experts
from moonpool.kernels.triton import kv as triton_kv
from moonpool.kernels.triton import merge as triton_merge
from moonpool.kernels.triton import quantised as triton_quantised
from moonpool.kernels.triton import rows as triton_rows
from moonpool.kernels.triton.launch import decode_choice


def merge_cases() -> Iterator[Case]:
    shape = {"DIM": 128, "DIM_PADDED": 128, "PARTS_PER_STEP": triton_merge.PARTS_PER_STEP}
    choice = decode_choice(128, 16, torch.bfloat16, torch.bfloat16, 80)
    constants = triton_decode.decode_constants(queries=1, group=4, head_dim=128, batch=64, choice=choice)
    yield Case(
        "merge split",
        triton_merge.merge_partitions,
        {
            **dict.fromkeys(("scratch", "scratch_lse", "lse"), "*fp32"),
            **dict.fromkeys(("contexts", "positions"), "*i32"),
            "out": "*bf16",
        },
        dict.fromkeys(("batch", "wanted", "window"), "i32"),
        constants | shape | {"KV_HEADS": 8, "WRITE_LSE": True},
    )
    yield Case(
        "merge states",
        triton_merge.merge_states,
        {"outs": "*bf16", "lses": "*fp32", "out": "*bf16", "lse": "*fp32"},
        {"num_rows": "i32", "num_parts": "i32"},
        shape,
    )


def row_cases(dtype: torch.dtype) -> Iterator[Case]:
    pointer = POINTERS[dtype]
    yield Case(
        "rms norm 8192",
        triton_rows.norm_row,
        dict.fromkeys(("x", "residual", "weight", "normed", "total"), pointer),
        {"hidden": "i32", "eps": "fp32"},
        {"ADD": True, "WIDTH": 8192},
        num_warps=16,
        loads_nbytes=16,
        divisible=("hidden",),
    )
    yield Case(
        "silu mul",
        triton_rows.silu_mul_tile,
        dict.fromkeys(("gate_up", "out"), pointer),
        {"inter": "i32"},
        {"WIDTH": 1024},
        loads_nbytes=16,
        divisible=("inter",),
    )


def kv_cases(dtype: torch.dtype, pool_dtype: torch.dtype) -> Iterator[Case]:
    pointer, stored = POINTERS[dtype], POINTERS[pool_dtype]
    kind = "bfloat16/fp8" if pool_dtype == FP8 else "bfloat16"
    factors = {"k_factor": "fp32", "v_factor": "fp32"}
    yield Case(
        f"write kv {kind}",
        triton_kv.write_token,
        {"k": pointer, "v": pointer, "pool": stored, "slots": "*i64"},
        STRIDES | factors,
        {"HEADS": 8, "DIM": 128, "BLOCK_SIZE": 16, "WIDTH": 1024, "FP8": pool_dtype == FP8},
        loads_nbytes=16,
    )
    yield Case(
        f"rotate and write {kind}",
        triton_kv.rotate_heads,
        dict.fromkeys(("qkv", "q", "q_norm", "k_norm"), pointer)
        | {"pool": stored, "positions": "*i64", "slots": "*i64", "cos": "*fp32", "sin": "*fp32"},
        STRIDES | factors | {"eps": "fp32"},
        {
            **{"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "BLOCK_SIZE": 16, "NORM_Q": True, "NORM_K": True},
            **{"HALF": 64, "HALF_PADDED": 64, "REST_PADDED": 1, "FP8": pool_dtype == FP8},
            "TILE": triton_kv.HEADS_PER_PROGRAM,
        },
        loads_nbytes=16,
    )


def expert_and_adapter_cases(dtype: torch.dtype) -> Iterator[Case]:
    pointer = POINTERS[dtype]
    for rows in (8, 512):
        choice = triton_experts.GroupedChoice.of(rows, dtype)
        yield Case(
            f"grouped matmul {choice.rows}",
            triton_experts.grouped_tile,
            dict.fromkeys(("x", "weights", "out"), pointer) | {"offsets": "*i32"},
            {"num_experts": "i32", "outs": "i32", "ins": "i32"},
            triton_experts.grouped_constants(64, choice),
            choice.num_warps,
            choice.num_stages,
            multiplies_tiles=True,
            multiplies_warpgroups=choice.rows >= 64,
            loads_nbytes=16,
            divisible=("outs", "ins"),
        )
    # A row begins at a multiple of 64 bytes: read 16 bytes at a time.
    tables = dict.fromkeys(("ids", "extents", "lines"), "*i32") | {"low": "*fp32"}
    line = LINE_NBYTES // dtype.itemsize
    yield Case(
        "lora down",
        triton_adapters.lora_down,
        {"x": pointer, "weights": pointer, **tables},
        {"ins": "i32", "width": "i32"},
        {"LINE": line, "RANKS": 16, "INS": triton_adapters.INS},
        loads_nbytes=16,
        divisible=("ins", "width"),
    )
    yield Case(
        "lora up",
        triton_adapters.lora_up,
        {"y": pointer, "weights": pointer, **tables},
        {"outs": "i32", "stride": "i32", "width": "i32"},
        {"LINE": line, "RANKS": 16, "OUTS": triton_adapters.OUTS},
        loads_nbytes=16,
        divisible=("outs", "stride", "width"),
    )


def checksum_cases() -> Iterator[Case]:
    spans = dict.fromkeys(("spans", "keys", "sums"), "*i64") | {"memory": "*u8"}
    yield Case(
        "checksum KiBs",
        triton_checksums.sum_kibs,
        spans,
        {"row_kibs": "i32"},
        {"KIBS": triton_checksums.KIBS_PER_PROGRAM},
        loads_nbytes=8,
    )
    yield Case(
        "checksum chain",
        triton_checksums.chain_kibs,
        spans | {"found": "*i64"},
        {"row_kibs": "i32"},
        {"TURN": triton_checksums.KIBS_PER_TURN},
        num_warps=1,
    )


def quantised_cases(dtype: torch.dtype, arch: int) -> Iterator[Case]:
    pointer = POINTERS[dtype]
    kinds: tuple[tuple[Kind, int, bool], ...] = (
        ("int8", 4096, False),
        ("int4", 128, True),
        ("int4", 64, False),
        ("int4", 32, False),
        ("fp8", 128, False),
    )
    for kind, group, has_zeros in kinds:
        for rows in (8, 512):
            choice = triton_quantised.QuantisedChoice.of(rows, group, dtype)
            yield Case(
                f"quantised {kind} G{group} {choice.rows}",
                triton_quantised.quantised_tile,
                dict.fromkeys(("x", "out"), pointer) | {"codes": "*u8", "scales": "*fp32", "zeros": "*i16"},
                dict.fromkeys(("n", "outs", "ins", "code_stride", "group", "groups"), "i32"),
                triton_quantised.quantised_constants(kind, choice, has_zeros=has_zeros, arch=arch),
                choice.num_warps,
                choice.num_stages,
                multiplies_tiles=True,
                loads_nbytes=16,
                divisible=("outs", "ins", "group"),
            )


def other_cases(arch: int) -> Iterator[Case]:
    """The cases of all kernels but attention."""
    yield from merge_cases()
    yield from row_cases(torch.bfloat16)
    yield from kv_cases(torch.bfloat16, torch.bfloat16)
    yield from kv_cases(torch.bfloat16, FP8)
    yield from expert_and_adapter_cases(torch.bfloat16)
    yield from checksum_cases()
    yield from quantised_cases(torch.bfloat16, arch)


def all_cases(arch: int) -> Iterator[Case]:
    for case in attention_cases():
        yield decode_case(case, arch)
        if case.queries == 1:
            yield prefill_case(case, arch)
    yield from other_cases(arch)
