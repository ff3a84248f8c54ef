"""What the kernels should reach: of the machine's own limits, and of what others reach in the same run."""

from __future__ import annotations

from typing import Any

# Decode on a GPU, of the rate of a large copy: 16-bit pages from this batch and context on, and one long
# sequence.
DECODE_OF_COPY = 0.85
DECODE_FROM_BATCH, DECODE_FROM_CONTEXT = 32, 4096
DECODE_OF_ONE = 0.7
DECODE_OF_ONE_FROM_CONTEXT = 128 << 10
# Of its own bytes/s with 16-bit pages.
FP8_OF_HALF = 0.75
# Of the rate over a pool that keeps each layer's blocks together.
STRIDED_OF_LAYER_MAJOR = 0.97
# Prefill, heads of 128, 8 k to 32 k: of cuDNN's rate on the dense equivalent.
PREFILL_OF_CUDNN = 0.7
PREFILL_FROM, PREFILL_TO = 8 << 10, 32 << 10
WRITE_OF_COPY = 0.8
# Decode on a CPU, batch 8 and context 2,048, of a plain read.
CPU_DECODE_OF_READ = 0.6


def at_least(goal: float | None) -> dict[str, Any]:
    """A row's limit, or none."""
    return {} if goal is None else {"limit": "at least", "limit_value": goal}


def of_decode(cuda: bool, batch: int, context: int, half: bool) -> float | None:
    if not half:
        return None
    if not cuda:
        return CPU_DECODE_OF_READ if (batch, context) == (8, 2048) else None
    if batch >= DECODE_FROM_BATCH and context >= DECODE_FROM_CONTEXT:
        return DECODE_OF_COPY
    return DECODE_OF_ONE if batch == 1 and context >= DECODE_OF_ONE_FROM_CONTEXT else None


def of_prefill(cuda: bool, head_dim: int, new: int, context: int) -> float | None:
    """Against cuDNN."""
    dense = new == context and PREFILL_FROM <= context <= PREFILL_TO
    return PREFILL_OF_CUDNN if cuda and head_dim == 128 and dense else None
