"""The forms in use on this machine, and the reasons: the kernels' part of ``moonpool doctor``."""

from __future__ import annotations

from typing import Any

import torch

from moonpool.kernels.cpu import library
from moonpool.runtime.machine.processor import cpuinfo


def backend_report() -> dict[str, Any]:
    """Facts about the forms in use on this machine. Compiles the library if necessary."""
    compiled = library.load() is not None
    return {
        "cpu": {
            "processor": cpuinfo().get("model name", ""),
            "form": "compiled" if compiled else "torch",
            "reason": "compiled for this processor" if compiled else library.why_not(),
        },
        "torch": torch.__version__,
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
