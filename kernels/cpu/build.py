"""Compilation of the C++ kernels for this machine's processor.

``python -m moonpool.kernels.cpu.build`` compiles ahead of time, otherwise the first import does. See
``moonpool.runtime.machine.compiled_library``.
"""

from __future__ import annotations

import platform
from pathlib import Path

from moonpool.runtime.machine.compiled_library import CompiledLibrary

# ARM compilers use another option.
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
_FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast", "-w",
    "-pthread", _NATIVE,
    # Tuned for AMD's processors, GCC makes two instructions of a fused one where a loop has few sums: a row
    # alone would be rounded otherwise than among others.
    "--param=avoid-fma-max-bits=0",
)  # fmt: skip
KERNELS = CompiledLibrary(
    "kernels",
    "the CPU kernels",
    "slower torch forms are used",
    Path(__file__).parent / "native",
    _FLAGS,
)

if __name__ == "__main__":
    raise SystemExit(KERNELS.build_verbosely())
