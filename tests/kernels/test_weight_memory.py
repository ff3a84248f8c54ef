"""Packed weights lie in huge pages, and take no more memory than in small ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moonpool.kernels.cpu import memory as weights
from moonpool.kernels.cpu.library import load
from moonpool.kernels.cpu.memory import HUGE_PAGE_NBYTES, spread, weight_memory
from moonpool.kernels.packed import PackedLinear
from moonpool.runtime.machine.processor import own_numa_nodes

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


def policy(address: int) -> str:
    """Of the kernel for the pages at an address of this process."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        first, name, *_ = line.split()
        if int(first, 16) == address:
            return name
    return "default"


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no NUMA nodes")
def test_weights_are_spread_over_the_nodes_that_run_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy(weight_memory(HUGE_PAGE_NBYTES).data_ptr()) == "default" or len(own_numa_nodes()) > 1
    node = own_numa_nodes()[0]
    # As a machine with several would, but only one is sure to be here.
    monkeypatch.setattr(weights, "_numa_nodes", lambda: [node, node])
    memory = weight_memory(3 * HUGE_PAGE_NBYTES)
    assert policy(memory.data_ptr()) == f"interleave:{node}"
    assert not memory.any()


def test_a_node_that_is_not_there_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    spread(weight_memory(HUGE_PAGE_NBYTES), [1000])
    assert "not spread over the NUMA nodes [1000]" in caplog.text


def test_nodes_are_those_of_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cpus in (("node0", "0-3,8"), ("node1", "4-7"), ("node2", ""), ("node10", "9")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus + "\n")
    (tmp_path / "power").mkdir()
    for cpus, nodes in (({8}, [0]), ({5, 9}, [1, 10]), ({1, 4}, [0, 1]), ({64}, [])):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cpus=cpus: cpus)
        assert own_numa_nodes(tmp_path) == nodes
