"""Compute threads of this process."""

from __future__ import annotations

from moonpool.kernels.threads import set_num_threads
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.machine.processor import usable_cores


def use_threads(options: EngineOptions) -> None:
    """Compute on ``engine.threads``. Every thread that runs steps must call this: OpenMP, which torch uses,
    counts per calling thread."""
    set_num_threads(options.compute_threads(usable_cores()))
