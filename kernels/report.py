"""What runs where, and why: the kernels' part of ``moonpool doctor``."""

from __future__ import annotations

from typing import Any

import torch


def backend_report() -> dict[str, Any]:
    """Facts about the forms in use on this machine. Cheap; builds nothing."""
    return {"cpu": {"form": "reference", "torch": torch.__version__}, "cuda": torch.cuda.is_available()}
