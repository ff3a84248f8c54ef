"""Plain form of the checksums of memory."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor


def checksum_spans(memory: Tensor, offsets: Tensor, nbytes: Tensor) -> Tensor:
    """Return xxh3-64, without a seed, of ``nbytes[i]`` bytes from ``offsets[i]`` on: int64 [k], its bits.

    memory: uint8 [n]; offsets, nbytes: int64 [k], in main memory. The result is on the device of ``memory``.
    """
    spans = [
        memory[offset : offset + size].cpu().numpy()
        for offset, size in zip(offsets.tolist(), nbytes.tolist(), strict=True)
    ]
    found = np.array([xxhash.xxh3_64_intdigest(span.data) for span in spans], np.uint64)
    return torch.from_numpy(found.view(np.int64)).to(memory.device)
