"""Packed weights lie in huge pages, and take no more memory than in small ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moonpool.kernels.cpu.library import load
from moonpool.kernels.cpu.memory import HUGE_PAGE_NBYTES, weight_memory
from moonpool.kernels.packed import PackedLinear

_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    not _SWITCH.exists() or "[never]" in _SWITCH.read_text(), reason="this kernel offers no huge pages"
)


def wants_huge_pages(address: int) -> bool:
    """Whether the kernel was asked for huge pages at an address of this process."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if "-" in word and not word.endswith(":"):
            first, end = (int(part, 16) for part in word.split("-"))
            found = first <= address < end
        elif word == "VmFlags:" and found:
            return "hg" in rest
    raise AssertionError(f"no mapping has {address:#x}")


@needs_huge_pages
@pytest.mark.skipif(load() is None, reason="no compiler here")
def test_packed_weights_are_in_huge_pages() -> None:
    linear = PackedLinear(torch.randn(2048, 1024).bfloat16())
    assert linear._packed is not None
    assert linear._packed.address % HUGE_PAGE_NBYTES == 0
    assert wants_huge_pages(linear._packed.address)


@needs_huge_pages
def test_the_last_part_of_a_page_is_in_small_ones() -> None:
    memory = weight_memory(HUGE_PAGE_NBYTES + 4096)
    assert wants_huge_pages(memory.data_ptr())
    assert not wants_huge_pages(memory.data_ptr() + HUGE_PAGE_NBYTES)


@pytest.mark.parametrize("nbytes", [0, 1000, HUGE_PAGE_NBYTES, 3 * HUGE_PAGE_NBYTES + 5])
def test_memory_is_zeros_of_its_size(nbytes: int) -> None:
    memory = weight_memory(nbytes)
    assert memory.dtype == torch.uint8
    assert memory.shape == (nbytes,)
    assert not memory.any()
    memory.fill_(7)
