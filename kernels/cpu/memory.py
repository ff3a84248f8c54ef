"""Memory of weights."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE_NBYTES = 2 << 20


def weight_memory(nbytes: int) -> Tensor:
    """Allocate zeros, uint8 [nbytes], for weights that every step reads: where the kernel offers huge pages,
    all but the last part of less than one lies in them. With pages of 4 KiB a read waits for page tables."""
    if nbytes < HUGE_PAGE_NBYTES:
        return torch.zeros(nbytes, dtype=torch.uint8)
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_NBYTES
    # A kernel without huge pages refuses.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES)
    return whole[start : start + nbytes]
