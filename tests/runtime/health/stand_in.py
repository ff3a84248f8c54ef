"""A simulated GPU behind the real NVML binding, for hardware faults."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pynvml
import pytest

UUID = "GPU-stand-in"


class GpuState(ctypes.Structure):
    """``struct state`` of ``nvml.c``."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("lost", "no_slowdown")),
        *(
            (name, ctypes.c_uint)
            for name in ("busy", "celsius", "slowdown", "margin", "milliwatts", "megahertz")
        ),
        *(
            (name, ctypes.c_ulonglong)
            for name in ("used", "total", "corrected", "uncorrected", "reasons", "xid")
        ),
    ]


@functools.cache
def _compiled() -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for the stand-in of NVML")
    library = Path(tempfile.mkdtemp(prefix="moonpool-")) / "libnvidia-ml-stand-in.so"
    options = ("-O1", "-Wall", "-Werror", "-shared", "-fPIC")
    source = Path(__file__).with_name("nvml.c")
    subprocess.run([compiler, *options, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


def gpu_stand_in(monkeypatch: pytest.MonkeyPatch) -> GpuState:
    """One healthy GPU, ``UUID``; NVML answers with the content of the returned struct."""
    library = _compiled()
    # Where the binding keeps the library once it is loaded, and the functions found in it.
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    state = GpuState.in_dll(library, "stand_in")
    for name, value in {
        "lost": 0, "no_slowdown": 0, "busy": 40, "celsius": 50, "slowdown": 90, "margin": 0,
        "milliwatts": 300_000, "megahertz": 1980, "used": 8 << 30, "total": 80 << 30,
        "corrected": 0, "uncorrected": 0, "reasons": 0, "xid": 0,
    }.items():  # fmt: skip
        setattr(state, name, value)
    return state
