"""Expert load: rows computed by each expert, counted at routing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig


class ExpertLoad:
    """A table per rank, written by that rank: int64 [num_layers, num_experts + 1], rows since the start, and
    last the choices of experts that were dropped: see ``CapacityRouter``.

    A token is a row of each of its top_k experts. Dense layers are 0. On a GPU padding rows count, too.
    """

    def __init__(self, config: ModelConfig, memory: npt.NDArray[np.uint8], num_ranks: int) -> None:
        """``memory``: at least ``nbytes``, zeroed; all ranks may share it."""
        whole = torch.from_numpy(memory[: self.nbytes(config, num_ranks)]).view(torch.int64)
        self.tables = whole.view(num_ranks, *_shape(config))

    @staticmethod
    def nbytes(config: ModelConfig, num_ranks: int) -> int:
        num_layers, width = _shape(config)
        return 8 * num_ranks * num_layers * width


def new_table(config: ModelConfig, device: torch.device) -> Tensor:
    """Return a table outside shared memory."""
    return torch.zeros(_shape(config), dtype=torch.int64, device=device)


def _shape(config: ModelConfig) -> tuple[int, int]:
    return config.num_layers, config.moe.num_experts + 1 if config.moe else 0
