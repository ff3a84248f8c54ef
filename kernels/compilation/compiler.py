"""Compile the Triton kernels without a GPU and report the resources that each needs.

Checked for each architecture: that a kernel compiles, its registers, spills and shared memory, the use of
tensor cores, the width of its loads, and that ptxas left no register unset. Run as ``python -m
moonpool.kernels.compilation.compiler``; ``--json FILE`` writes the table. The exit code is 1 if a kernel has
a fault.
"""

# Triton is untyped.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moonpool.kernels.compilation.assembly import unset_registers
from moonpool.kernels.compilation.catalog import all_cases
from moonpool.kernels.compilation.kernel_case import Case
from moonpool.runtime.machine.processor import usable_cores

# By architecture: shared memory of a program and of a multiprocessor, in bytes.
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}
SHARED_OF_MULTIPROCESSOR = {80: 164 << 10, 90: 228 << 10}
REGISTERS_OF_MULTIPROCESSOR = 65536
# Kernels that may spill, and up to how many bytes a thread.
SPILLS_ALLOWED: dict[str, int] = {
    # Exact float32 multiplies three times; heads of 256 do not fit. No supported model uses them in float32.
    "prefill wide D256 G4 B16": 112,
}
# (title, field, width) as printed.
COLUMNS = (
    ("arch", "arch", 5),
    ("warps", "num_warps", 6),
    ("regs", "registers", 5),
    ("spill", "spill_nbytes", 6),
    ("shared", "shared_nbytes", 8),
    ("MMA", "num_tensor_core_instructions", 5),
    ("HGMMA", "num_warpgroup_instructions", 6),
    ("load", "widest_load_nbytes", 5),
    ("fits", "resident", 5),
)


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel. Spills are bytes a thread, shared memory is bytes a program.

    ``resident``: programs that fit on a multiprocessor at once. ``widest_load_nbytes``: bytes of one thread's
    widest load instruction; 16 is the hardware's maximum.
    """

    case: str
    arch: int
    num_warps: int
    registers: int
    spill_nbytes: int
    shared_nbytes: int
    num_tensor_core_instructions: int
    num_warpgroup_instructions: int
    widest_load_nbytes: int
    num_unset_reads: int = 0  # instructions with a register that no one may have written

    @property
    def resident(self) -> int:
        # Registers are allocated to warps in units of 256; each program reserves 1 KiB of shared memory.
        per_warp = -(-self.registers * 32 // 256) * 256
        by_registers = REGISTERS_OF_MULTIPROCESSOR // (per_warp * self.num_warps)
        by_shared = SHARED_OF_MULTIPROCESSOR[self.arch] // (self.shared_nbytes + 1024)
        return min(by_registers, by_shared, 64 // self.num_warps, 32)

    def faults(self, case: Case) -> list[str]:
        """One sentence for each property that violates ``case``; empty for a kernel without faults."""
        name, found = f"{self.case} on sm_{self.arch}", []
        if self.spill_nbytes > SPILLS_ALLOWED.get(self.case, 0):
            found.append(f"{name} spills {self.spill_nbytes} bytes a thread")
        if self.shared_nbytes > SHARED_LIMIT[self.arch]:
            found.append(f"{name} needs {self.shared_nbytes} bytes of shared memory")
        if case.multiplies_tiles and not self.num_tensor_core_instructions:
            found.append(f"{name} does not use the tensor cores")
        if case.multiplies_warpgroups and self.arch >= 90 and not self.num_warpgroup_instructions:
            found.append(f"{name} does not multiply by warp groups")
        if self.widest_load_nbytes < case.loads_nbytes:
            found.append(f"{name} loads {self.widest_load_nbytes} bytes at a time, not {case.loads_nbytes}")
        if self.num_unset_reads:
            found.append(f"{name} reads registers that are not set, in {self.num_unset_reads} instructions")
        if self.resident < case.resident:
            found.append(f"{name} fits {self.resident} times on a multiprocessor, not {case.resident}")
        return found


def compile_case(case: Case, arch: int) -> Resources:
    """Compile for ``sm_<arch>``, as for a launch: all pointers and strides that Triton specializes are
    multiples of 16."""
    names = case.kernel.arg_names
    types = case.pointers | case.scalars
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, parameter) in enumerate(zip(names, case.kernel.params, strict=True))
        if not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        and (name in case.pointers or name.endswith(("stride", "offset")) or name in case.divisible)
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
    # LDG and LDGSTS (global to shared memory) without a width read 4 bytes.
    loads = re.findall(r"\bLDG(?:STS)?\.E\S*", assembly)
    widths = [int(bits) // 8 for load in loads for bits in re.findall(r"\.(64|128)\b", load)]
    return Resources(
        case.name,
        arch,
        case.num_warps,
        found["REG"],
        max(found["STACK"], found["LOCAL"]),
        compiled.metadata.shared,
        len(re.findall(r"\bH(?:G)?MMA\b", assembly)),
        len(re.findall(r"\bHGMMA\b", assembly)),
        max(widths, default=4 if loads else 0),
        len(unset_registers(assembly)),
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


def compile_all(cases: list[Case], arch: int) -> list[tuple[Resources, list[str]]]:
    """Each case's resources and faults, compiled by a process a core, at least two.

    Threads would not do: ``ast.parse`` of Python 3.11 is not thread-safe (SystemError: AST constructor
    recursion depth mismatch). On two cores, two processes take 8 s where one takes 11 s.
    """
    # A kernel is not picklable; its name is.
    jobs = [
        (replace(case, kernel=None), case.kernel.__module__, case.kernel.__name__, arch) for case in cases
    ]
    with ProcessPoolExecutor(max(usable_cores(), 2), get_context("spawn")) as workers:
        made = list(workers.map(_compile_named, jobs))
    return [(resources, resources.faults(case)) for resources, case in zip(made, cases, strict=True)]


def _compile_named(job: tuple[Case, str, str, int]) -> Resources:
    case, module, kernel, arch = job
    return compile_case(replace(case, kernel=getattr(import_module(module), kernel)), arch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--arch", type=int, nargs="*", default=[90, 80])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the resources there")
    arguments = parser.parse_args()
    print(f"{'kernel':<40}" + "".join(f"{title:>{width}}" for title, _, width in COLUMNS))
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for arch in arguments.arch:
        for made, wrong in compile_all(list(all_cases(arch)), arch):
            row = asdict(made) | {"resident": made.resident}
            print(f"{made.case:<40}" + "".join(f"{row[key]:>{width}}" for _, key, width in COLUMNS))
            rows.append(row)
            faults += wrong
    for fault in faults:
        print(fault, file=sys.stderr)
    if arguments.json is not None:
        versions: dict[str, Any] = {"triton": triton.__version__}
        arguments.json.write_text(json.dumps({"versions": versions, "kernels": rows}, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
