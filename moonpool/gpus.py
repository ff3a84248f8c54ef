"""The GPUs of this machine, and how the nodes of one cluster share them."""

from __future__ import annotations

import ctypes
import importlib.metadata

from runtime.options import Config


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


def gpu_options(config: Config, gpus: int) -> list[tuple[str, ...]]:
    """What each prefill and then each decode node is told: its GPU, and its share of that GPU's memory.

    They go round the GPUs; those of one GPU share alike what ``engine.gpu_memory`` allows of it.
    """
    num_nodes = config.cluster.prefill + config.cluster.decode
    if not gpus:
        return [()] * num_nodes
    device = config.model.device
    options: list[tuple[str, ...]] = []
    for i in range(num_nodes):
        sharers = len(range(i % gpus, num_nodes, gpus))
        # Cut off, not rounded: together they may not take more than is allowed.
        share = int(config.engine.gpu_memory / sharers * 1000) / 1000
        name = device if ":" in device else f"cuda:{i % gpus}"
        options.append((f"model.device={name}", f"engine.gpu_memory={share:g}"))
    return options
