"""The GPUs of this machine, and which a replica has."""

from __future__ import annotations

import ctypes
import importlib.metadata

from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError


def num_gpus() -> int:
    """How many CUDA would give a process of ours. Without torch, whose import takes seconds."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def computes_on_gpus(config: Config) -> int:
    """How many GPUs the nodes of this configuration are spread over; 0: they compute on CPUs."""
    device = config.model.device
    if device == "cpu" or (device == "auto" and "+cpu" in importlib.metadata.version("torch")):
        return 0
    available = num_gpus()
    return min(available, 1) if ":" in device else available


def replica_devices(config: Config) -> list[str]:
    """``model.device`` of each replica of a node: on GPUs, replica r has those from r × its ranks of this
    machine on.

    Raises ConfigError where there are too few.
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
