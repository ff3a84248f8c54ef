"""How many rows the experts of a mixture were given: counted where they are routed, read by whoever asks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig


class ExpertLoad:
    """A table for each rank, counted into by that rank alone: int64 [num_layers, num_experts], rows since the
    start. A row is one of the experts that a token chose. Dense layers stay 0; models without experts have
    empty tables. (On a GPU the rows that pad a recorded step to its size are counted too.)
    """

    def __init__(self, config: ModelConfig, memory: npt.NDArray[np.uint8], num_ranks: int) -> None:
        """``memory``: ``nbytes`` of it, zeroed, which all ranks may share."""
        whole = torch.from_numpy(memory[: self.nbytes(config, num_ranks)]).view(torch.int64)
        self.tables = whole.view(num_ranks, *_shape(config))

    @staticmethod
    def nbytes(config: ModelConfig, num_ranks: int) -> int:
        num_layers, num_experts = _shape(config)
        return 8 * num_ranks * num_layers * num_experts


def new_table(config: ModelConfig, device: torch.device) -> Tensor:
    """Of a rank that shares none."""
    return torch.zeros(_shape(config), dtype=torch.int64, device=device)


def skew(load: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """load: rows [num_layers, num_experts], counted or the difference of two counts. Returns, for each layer
    that was given any, the rows of its busiest expert over the mean of its experts: 1 is even.
    """
    busy = load[load.sum(axis=1) > 0]
    return busy.max(axis=1) / busy.mean(axis=1) if len(busy) else np.empty(0)


def _shape(config: ModelConfig) -> tuple[int, int]:
    return config.num_layers, config.moe.num_experts if config.moe else 0
