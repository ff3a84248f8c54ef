"""Compiles the Triton kernels for a GPU that need not be there, and says what each takes of a multiprocessor.

What can be seen without a GPU: that a kernel compiles for the architecture, its registers, its spills to
local memory, its shared memory, and whether the tensor cores are used. ``python -m kernels.triton_compile``
prints it.
"""

# Triton has no types to check.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import (
    triton_adapters,
    triton_blocks,
    triton_decode,
    triton_experts,
    triton_kv,
    triton_prefill,
    triton_rows,
)

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
# Shared memory a program may have, in bytes.
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}
# Kernels that may spill, up to so many bytes a thread, and why.
SPILLS_ALLOWED = {
    # Exact float32 multiplies three times; heads this long do not fit, and nobody serves them so.
    "prefill float32 D256 G4 B16": 112,
}


@dataclass(frozen=True)
class Case:
    """One kernel with the shapes it is compiled for."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    scalars: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 2
    multiplies_tiles: bool = False


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes. Spills and stack are bytes a thread, shared memory bytes a program."""

    case: str
    arch: int
    registers: int
    spill_nbytes: int
    shared_nbytes: int
    num_tensor_core_instructions: int

    def faults(self, multiplies_tiles: bool) -> list[str]:
        """What must not be, in sentences; none for a kernel that is fit for use."""
        found = []
        if self.spill_nbytes > SPILLS_ALLOWED.get(self.case, 0):
            found.append(f"{self.case} on sm_{self.arch} spills {self.spill_nbytes} bytes a thread")
        if self.shared_nbytes > SHARED_LIMIT[self.arch]:
            found.append(f"{self.case} on sm_{self.arch} wants {self.shared_nbytes} bytes of shared memory")
        if multiplies_tiles and not self.num_tensor_core_instructions:
            found.append(f"{self.case} on sm_{self.arch} does not use the tensor cores")
        return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attention_cases(
    dtype: torch.dtype, head_dim: int, group: int, block_size: int, arch: int
) -> Iterator[Case]:
    pointer = POINTERS[dtype]
    strides = dict.fromkeys(
        ("layer_offset", "block_stride", "kv_stride", "head_stride", "table_stride"), "i32"
    )
    rules = {"scale": "fp32", "window": "i32", "soft_cap": "fp32"}
    shape = f"{_dtype_name(dtype)} D{head_dim} G{group} B{block_size}"
    decode = triton_decode.DecodeChoice.of(head_dim, dtype)
    yield Case(
        f"decode {shape}",
        triton_decode.decode_part,
        {"q": pointer, "pool": pointer, "table": "*i32", "contexts": "*i32", "out": "*fp32", "lse": "*fp32"},
        strides | rules | {"num_parts": "i32"},
        triton_decode.decode_constants(group, head_dim, block_size, decode.tile, capped=False),
        decode.num_warps,
        decode.num_stages,
        multiplies_tiles=dtype is not torch.float32,
    )
    prefill = triton_prefill.PrefillChoice.of(head_dim, dtype, arch)
    names = ("q", "pool", "table", "starts", "contexts", "out")
    types = (pointer, pointer, "*i32", "*i32", "*i32", pointer)
    yield Case(
        f"prefill {shape}",
        triton_prefill.prefill_tile,
        dict(zip(names, types, strict=True)),
        strides | {"batch": "i32"} | rules,
        triton_prefill.prefill_constants(group, head_dim, block_size, 64, prefill, capped=False),
        prefill.num_warps,
        prefill.num_stages,
        multiplies_tiles=dtype is not torch.float32,
    )


def other_cases(dtype: torch.dtype) -> Iterator[Case]:
    pointer, name = POINTERS[dtype], _dtype_name(dtype)
    strides = dict.fromkeys(("layer_offset", "block_stride", "kv_stride", "head_stride"), "i32")
    yield Case(
        "merge parts",
        triton_decode.merge_parts,
        {"parts": "*fp32", "lse": "*fp32", "out": pointer, "merged_lse": "*fp32"},
        {"num_rows": "i32", "num_parts": "i32"},
        {"WRITE_LSE": True, "DIM": 128, "DIM_PADDED": 128, "PARTS_PADDED": 64},
        num_warps=4,
    )
    yield Case(
        f"rms norm {name} 8192",
        triton_rows.norm_row,
        dict.fromkeys(("x", "residual", "weight", "normed", "total"), pointer),
        {"hidden": "i32", "eps": "fp32"},
        {"ADD": True, "WIDTH": 8192},
        num_warps=16,
    )
    yield Case(
        f"silu mul {name}",
        triton_rows.silu_mul_tile,
        dict.fromkeys(("gate_up", "out"), pointer),
        {"inter": "i32"},
        {"WIDTH": 1024},
        num_warps=4,
    )
    yield Case(
        f"write kv {name}",
        triton_kv.write_token,
        dict.fromkeys(("k", "v", "pool"), pointer) | {"slots": "*i64"},
        strides,
        {"HEADS": 8, "DIM": 128, "BLOCK_SIZE": 16, "WIDTH": 1024},
        num_warps=4,
    )
    yield Case(
        "move block",
        triton_blocks.move_block,
        {"source": "*i32", "target": "*i32", "source_ids": "*i64", "target_ids": "*i64"},
        {"words": "i32"},
        {"FROM": True, "TO": True, "WIDTH": triton_blocks.WIDTH},
        num_warps=4,
    )
    rotary = {"HALF": 64, "HALF_PADDED": 64, "REST_PADDED": 1}
    yield Case(
        f"rotate and write {name}",
        triton_kv.rotate_head,
        dict.fromkeys(("qkv", "pool", "q", "q_norm", "k_norm"), pointer)
        | {"positions": "*i64", "slots": "*i64", "cos": "*fp32", "sin": "*fp32"},
        strides | {"eps": "fp32"},
        {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "BLOCK_SIZE": 16, "NORM_Q": True, "NORM_K": True} | rotary,
        num_warps=1,
    )


def expert_and_adapter_cases(dtype: torch.dtype) -> Iterator[Case]:
    pointer, name = POINTERS[dtype], _dtype_name(dtype)
    for rows in (8, 512):
        choice = triton_experts.GroupedChoice.of(rows, dtype)
        yield Case(
            f"grouped matmul {name} {choice.rows}",
            triton_experts.grouped_tile,
            dict.fromkeys(("x", "weights", "out"), pointer) | {"offsets": "*i32"},
            {"num_experts": "i32", "outs": "i32", "ins": "i32"},
            triton_experts.grouped_constants(64, choice),
            choice.num_warps,
            choice.num_stages,
            multiplies_tiles=dtype is not torch.float32,
        )
    yield Case(
        f"lora down {name}",
        triton_adapters.lora_down,
        {"x": pointer, "a": pointer, "ids": "*i32", "low": "*fp32"},
        {"ins": "i32", "rank": "i32"},
        {"RANK": 16, "INS": triton_adapters.INS},
        num_warps=4,
    )
    yield Case(
        f"lora up {name}",
        triton_adapters.lora_up,
        {"y": pointer, "b": pointer, "ids": "*i32", "scales": "*fp32", "low": "*fp32"},
        {"outs": "i32", "rank": "i32"},
        {"RANK": 16, "OUTS": triton_adapters.OUTS},
        num_warps=4,
    )
    sides = [
        f"{side}_{part}" for side in ("source", "target") for part in ("block", "layer", "kv", "head", "slot")
    ]
    yield Case(
        f"reshard {name}",
        triton_blocks.reshard_token,
        {"source": pointer, "target": pointer},
        dict.fromkeys((*sides, "heads", "dim"), "i32"),
        {"SOURCE_SIZE": 16, "TARGET_SIZE": 64, "HEADS": 8, "DIM": 128},
        num_warps=1,
    )


def all_cases(arch: int) -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (64, 128, 256):
            yield from attention_cases(dtype, head_dim, group=4, block_size=16, arch=arch)
    for group, block_size in ((1, 16), (7, 16), (8, 256), (32, 64)):
        yield from attention_cases(torch.bfloat16, 128, group, block_size, arch)
    yield from other_cases(torch.bfloat16)
    yield from expert_and_adapter_cases(torch.bfloat16)


def compile_case(case: Case, arch: int) -> Resources:
    """Compile for ``sm_<arch>``; all pointers and strides are taken as multiples of 16, as they are in
    use."""
    names = case.kernel.arg_names
    types = case.pointers | case.scalars
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in case.pointers or name.endswith(("stride", "offset"))
    }
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    usage, assembly = _inspect(compiled.asm["cubin"])
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(
        case.name,
        arch,
        found["REG"],
        max(found["STACK"], found["LOCAL"]),
        compiled.metadata.shared,
        len(re.findall(r"\bH(?:G)?MMA\b", assembly)),
    )


def _inspect(cubin: bytes) -> tuple[str, str]:
    """The resource line and the assembly of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        answers = [
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        ]
    return answers[0], answers[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--arch", type=int, nargs="*", default=[90, 80])
    arguments = parser.parse_args()
    print(f"{'kernel':<36}{'arch':>6}{'registers':>11}{'spill':>7}{'shared':>9}{'MMA':>6}")
    for arch in arguments.arch:
        for case in all_cases(arch):
            made = compile_case(case, arch)
            print(
                f"{made.case:<36}{made.arch:>6}{made.registers:>11}{made.spill_nbytes:>7}"
                f"{made.shared_nbytes:>9}{made.num_tensor_core_instructions:>6}"
            )
            for fault in made.faults(case.multiplies_tiles):
                print(f"  {fault}")


if __name__ == "__main__":
    main()
