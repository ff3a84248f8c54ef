"""Where and in which precision a model is computed."""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from runtime.errors import ConfigError

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(option: str) -> torch.device:
    """``auto`` is the GPU where there is one. Raises ConfigError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if option == "cuda" and not available:
        raise ConfigError("model.device is cuda, but torch sees no CUDA device here: use auto or cpu")
    return torch.device("cuda" if available and option != "cpu" else "cpu")


def choose_dtype(option: str, config: ModelConfig, device: torch.device) -> str:
    """``auto``: on a GPU what the checkpoint is stored in, on a CPU float32.

    The rule must not depend on a measurement at start: nodes that choose differently cannot exchange blocks.
    """
    if option != "auto":
        return option
    return config.stored_dtype if device.type == "cuda" else "float32"
