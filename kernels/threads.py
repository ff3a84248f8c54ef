"""Number of threads that the kernels compute on."""

from __future__ import annotations

import torch

from moonpool.kernels.cpu.cpu_features import has_amx
from moonpool.kernels.cpu.library import load


def set_num_threads(num_threads: int) -> None:
    """Compute on ``num_threads`` threads, the caller included. No result depends on it.

    The compiled library's are those of the process. torch's are those of the calling thread, and there are
    several only where products are torch's own: OpenMP's threads wait for each other, so that one busy core
    delays a small operation by milliseconds.
    """
    library = load()
    if library is not None:
        library.gil_released["set_threads"][None](num_threads)
    torch.set_num_threads(num_threads if library is None or has_amx() else 1)


def get_num_threads() -> int:
    """The threads of the compiled library, or torch's without it."""
    library = load()
    return torch.get_num_threads() if library is None else int(library.gil_held["get_threads"][None]())
