"""Memory of weights."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from moonpool.runtime.machine.processor import own_numa_nodes

log = logging.getLogger(__name__)

HUGE_PAGE_NBYTES = 2 << 20
_MPOL_INTERLEAVE = 3
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call


def weight_memory(nbytes: int) -> Tensor:
    """Allocate zeros, uint8 [nbytes], for weights that every step reads.

    Where the kernel offers huge pages, all but the last part of less than one lies in them: with pages of
    4 KiB a read waits for page tables. Where this process runs on several NUMA nodes, the pages are spread
    over them in turn: a task may be any thread's, so each node would read the other's memory alone otherwise.
    """
    if nbytes < HUGE_PAGE_NBYTES:
        return torch.zeros(nbytes, dtype=torch.uint8)
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_NBYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        # A kernel without huge pages refuses.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES)
    memory = whole[start : start + nbytes]
    if len(nodes := _numa_nodes()) > 1:
        spread(memory, nodes)
    return memory


_numa_nodes = cache(own_numa_nodes)


def spread(memory: Tensor, nodes: Sequence[int]) -> None:
    """Have the pages of ``memory`` that are not touched yet come from these NUMA nodes in turn.

    Its address is a multiple of the page size. A kernel that refuses is told of in the log; the pages are
    then those of the threads that write them.
    """
    number = _MBIND.get(platform.machine())
    mask = (ctypes.c_ulong * 16)()  # 1,024 nodes
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    address, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_ulong(memory.nbytes)
    most = ctypes.c_ulong(len(mask) * bits)
    if number is None or libc.syscall(number, address, nbytes, _MPOL_INTERLEAVE, mask, most, 0):
        why = os.strerror(ctypes.get_errno()) if number is not None else platform.machine()
        log.warning("weights are not spread over the NUMA nodes %s: %s", list(nodes), why)
