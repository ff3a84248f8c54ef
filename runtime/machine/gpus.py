"""The GPUs of this machine, and their assignment to replicas."""

from __future__ import annotations

import ctypes
import importlib.metadata

from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError


def num_gpus() -> int:
    """The number of GPUs that CUDA offers this process, without the import of torch."""
    return len(gpu_names())


def gpu_names() -> list[str]:
    """Their names, such as "NVIDIA H200", the same way."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    names = []
    for number in range(count.value):
        failed = cuda.cuDeviceGet(ctypes.byref(device), number)
        failed = failed or cuda.cuDeviceGetName(name, len(name), device)
        names.append("unknown GPU" if failed else name.value.decode())
    return names


def computes_on_gpus(config: Config) -> int:
    """The number of GPUs that nodes of this configuration use; 0: they compute on CPUs."""
    device = config.model.device
    if device == "cpu" or (device == "auto" and "+cpu" in importlib.metadata.version("torch")):
        return 0
    available = num_gpus()
    return min(available, 1) if ":" in device else available


def replica_devices(config: Config) -> list[str]:
    """``model.device`` of each replica of a node; the GPUs of a replica are consecutive.

    Raises ConfigError if there are too few GPUs.
    """
    parallel, device = config.engine.parallel, config.model.device
    if not computes_on_gpus(config):
        return [device] * parallel.dp
    available, first, each = num_gpus(), int(device.partition(":")[2] or 0), parallel.ranks_per_host
    if first + parallel.dp * each > available:
        raise ConfigError(
            f"engine.parallel: dp {parallel.dp} with {each} GPUs a replica needs "
            f"{parallel.dp * each} GPUs from cuda:{first} on, there are {available}: valid "
            f"for dp is at most {max(available - first, 0) // each}",
            "engine.parallel.dp",
        )
    return [f"cuda:{first + number * each}" for number in range(parallel.dp)]
