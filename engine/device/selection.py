"""Where and in which precision a model is computed."""

from __future__ import annotations

import torch

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.device import CpuDevice, Device
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.errors import ConfigError

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,  # of pages only
}


def choose_device(option: str) -> Device:
    """``auto`` is the first GPU where there is one. Raises ConfigError for a GPU that is not there."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if option == "cpu" or (option == "auto" and not num_gpus):
        return CpuDevice()
    wanted = torch.device("cuda" if option == "auto" else option)
    if (wanted.index or 0) >= num_gpus:
        raise ConfigError(
            f"model.device is {option}, but torch sees {num_gpus or 'no'} CUDA devices here: use auto or cpu",
            "model.device",
        )
    from moonpool.engine.device.cuda import CudaDevice

    return CudaDevice(wanted)


def choose_dtype(option: str, config: ModelConfig, device: Device) -> str:
    """``auto``: on a GPU what the checkpoint is stored in, on a CPU float32.

    The rule must not depend on a measurement at start: nodes that choose differently cannot exchange blocks.
    """
    if option != "auto":
        return option
    return "float32" if device.torch.type == "cpu" else config.stored_dtype


def page_dtype(options: EngineOptions, dtype: str) -> str:
    """What K and V are kept in by an engine that computes in ``dtype``."""
    return "float8_e4m3fn" if options.kv_dtype == "fp8_e4m3" else dtype
