"""Choice of the device and the precision of a model."""

from __future__ import annotations

from math import prod

import torch

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.device import CpuDevice, Device, DeviceMemory
from moonpool.engine.sharding.tensor_slices import expected_tensors
from moonpool.runtime.config.engine_options import CPU_LIMITS, StepLimits
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.errors import ConfigError

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # KV pages only.
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}


# Below this many weights a model on a CPU computes in float32 by default.
SMALL_NUM_WEIGHTS = 100_000_000


# By the memory of a GPU in GiB. A product of n tokens reads its weights once: below about 300 tokens (a
# Hopper's operations by its bytes a second) it waits for memory, and a step costs one to two milliseconds of
# launches, so chunks are long where their activations (about 0.2 MiB a token) fit easily beside weights.
_GPU_LIMITS = (
    (64, StepLimits(8192, 256)),
    (32, StepLimits(4096, 256)),
    (0, StepLimits(2048, 128)),
)


def step_limits(memory: DeviceMemory | None) -> StepLimits:
    """Return the default sizes of steps on a device with this memory; None: main memory."""
    if memory is None:
        return CPU_LIMITS
    return next(limits for gib, limits in _GPU_LIMITS if memory.total_nbytes >= gib << 30)


def choose_device(option: str) -> Device:
    """Return the device; ``auto`` is the first GPU, if any. Raises ConfigError for a missing GPU."""
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
    """Return the dtype; ``auto``: that of the checkpoint, and on a CPU float32 for small models: they
    spend their time elsewhere than in products.

    It must not depend on a measurement: nodes with different dtypes cannot exchange blocks.
    """
    if option != "auto":
        return option
    is_small = sum(prod(shape) for shape in expected_tensors(config).values()) < SMALL_NUM_WEIGHTS
    return "float32" if device.torch.type == "cpu" and is_small else config.stored_dtype


def weights_dtype(config: ModelConfig, dtype: str) -> str:
    """Return how the weights are held by an engine that computes in ``dtype``, for people."""
    return dtype if config.weights is None else f"{config.weights.name}, computed in {dtype}"


def page_dtype(options: EngineOptions, dtype: str) -> str:
    """Return the dtype of K and V for an engine that computes in ``dtype``."""
    return {"fp8_e4m3": "float8_e4m3fn", "int8": "int8"}.get(options.kv_dtype, dtype)


def check_pages(options: EngineOptions, config: ModelConfig, device: Device) -> None:
    """Raises ConfigError: no kernel has pages of this dtype for the model or the device."""
    if options.kv_dtype != "int8":
        return
    if config.latent is not None or device.torch.type != "cpu" or config.head_dim % 4:
        heads = f"heads of {config.head_dim} on {device.torch.type}"
        what = heads if config.latent is None else "latents"
        raise ConfigError(
            f"engine.kv_dtype: int8 pages have no kernel for {what}: use fp8_e4m3 or auto", "engine.kv_dtype"
        )
