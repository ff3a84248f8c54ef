"""The forms in use on this machine, and the reasons: the kernels' part of ``moonpool doctor``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from moonpool.kernels.cpu import library
from moonpool.kernels.cpu.cpu_features import features, has_amx
from moonpool.runtime.machine.compiled_library import find_compiler
from moonpool.runtime.machine.processor import cpuinfo


def backend_report() -> dict[str, Any]:
    """Facts about the forms in use on this machine. Compiles the library if necessary."""
    loaded = library.load()
    cpu: dict[str, Any] = {
        "processor": cpuinfo().get("model name", ""),
        "features": list(features()),
        "form": "torch" if loaded is None else "compiled",
        "reason": library.why_not() if loaded is None else "compiled for this processor",
        "library": None if loaded is None else str(loaded.path),
        "bfloat16_linear": "torch (oneDNN uses the matrix unit)" if has_amx() and loaded else None,
        "compiler": find_compiler(),
    }
    return {
        "cpu": cpu,
        "torch": torch.__version__,
        "triton": find_spec("triton") is not None,
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
