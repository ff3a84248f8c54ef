"""Regions: what can be registered, what is allocated, and when it may be taken away."""

from __future__ import annotations

import array
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from moonpool.transfer import AgentClosed, RegionError, Span, SpanError, TransferAgent
from moonpool.transfer.copying.pool import ThreadTuner
from moonpool.transfer.memory import allocation as memory
from moonpool.transfer.memory.region import MAX_OPEN_REGIONS
from moonpool.transfer.native import libc


def mapped_of_shm() -> int:
    """How many maps of files in /dev/shm this process has; what others leave there says nothing of it."""
    return Path("/proc/self/maps").read_text().count(" /dev/shm/")


def has_populate() -> bool:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    return libc.madvise(
        memory.address_of(np.frombuffer(page, np.uint8)), mmap.PAGESIZE, libc.MADV_POPULATE_WRITE
    )


@pytest.mark.parametrize("backing", ["anonymous", "memfd"])
@pytest.mark.parametrize("nbytes", [1, 4096, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_memory_is_zeroed_present_and_ours(backing: memory.Backing, nbytes: int) -> None:
    before = mapped_of_shm()
    allocated = memory.allocate(nbytes, "test", backing)
    assert len(allocated.array) == nbytes
    assert not allocated.array.any()
    assert memory.address_of(allocated.array) % mmap.PAGESIZE == 0
    assert mapped_of_shm() == before
    allocated.array[:] = 255
    if allocated.fd >= 0:
        mapped = memory.map_shared(allocated.fd, nbytes)
        assert mapped.tobytes() == allocated.array.tobytes()
        assert not mapped.flags.writeable
        # A peer cannot pull the file from under a reader.
        with pytest.raises(OSError):
            os.ftruncate(allocated.fd, 0)
        with pytest.raises(OSError):
            memory.map_shared(allocated.fd, nbytes + 1)
        # Nor write to it: writes need a grant.
        with pytest.raises(PermissionError):
            mmap.mmap(allocated.fd, nbytes)
        with pytest.raises(PermissionError):
            os.pwrite(allocated.fd, b"x", 0)
        allocated.array[:] = 254
        assert (mapped == 254).all()
        allocated.array[:] = 255
    allocated.close()
    assert (allocated.array == 255).all()


def test_an_unsealed_file_is_not_mapped() -> None:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)
    with pytest.raises(OSError, match="sealed"):
        memory.map_shared(fd, 4096)
    os.close(fd)


def mapped_nbytes(address: int) -> int:
    """Of the pages of this process's map that begins at or before ``address``."""
    for block in Path("/proc/self/smaps").read_text().split("VmFlags")[:-1]:
        lines = [line for line in block.splitlines() if "-" in line.split(" ")[0]]
        begin, end = (int(part, 16) for part in lines[0].split(" ")[0].split("-"))
        if begin <= address < end:
            facts = dict(line.split(":", 1) for line in block.splitlines() if ":" in line and "kB" in line)
            return int(facts["Rss"].removesuffix("kB")) << 10
    pytest.fail("the memory is not mapped")


def test_every_page_is_present() -> None:
    allocated = memory.allocate(8 << 20, "test", "anonymous")
    assert mapped_nbytes(memory.address_of(allocated.array)) >= 8 << 20


@pytest.mark.skipif(not has_populate(), reason="needs Linux 5.14")
async def test_pages_may_be_mapped_later_while_they_are_in_use(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.memory, "_backing", "memfd")
    region, closed = (agent.allocate(40 << 20, name, mapped=False) for name in ("kept", "closed"))
    used = region.array[5 << 20 : 6 << 20]
    used[:] = 7
    assert mapped_nbytes(region.address) < 40 << 20
    closed.close()
    await agent.map_pages()
    # The kernel may take single pages away again at once, as it moves them or wants memory; a step is 8 MiB.
    assert mapped_nbytes(region.address) > 39 << 20
    assert (used == 7).all()
    assert int(region.array.sum()) == 7 << 20


def test_too_much_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        memory.allocate(1 << 60, "test", "anonymous")


async def test_what_can_be_registered(agent: TransferAgent) -> None:
    matrix = np.arange(24, dtype=np.float32).reshape(4, 6)
    for buffer in (bytearray(96), array.array("d", [1.0] * 12), matrix, memoryview(bytearray(96)).cast("I")):
        region = agent.register(buffer)
        assert region.nbytes == 96
        assert region.backing == "registered"
        region.array[0] = 77
        assert memoryview(buffer).cast("B")[0] == 77
        region.close()
        region.close()
        assert region.closed
    for bad, message in (
        (bytes(8), "read-only"),
        (bytearray(0), "zero bytes"),
        (matrix[:, ::2], "contiguous"),
        (memoryview(bytearray(8))[::2], "contiguous"),
        (np.array([object()]), "Python objects"),
    ):
        with pytest.raises(ValueError, match=message):
            agent.register(bad)
    with pytest.raises(TypeError):
        agent.register("text")  # type: ignore[arg-type]
    read_only = agent.register(bytes(8), writable=False)
    assert read_only.buffer.readonly
    with pytest.raises(ValueError, match="at least one byte"):
        agent.allocate(0, "nothing")


async def test_tensors_are_registered_without_importing_their_library(agent: TransferAgent) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(100, dtype=torch.bfloat16)
    region = agent.register(tensor)
    assert region.nbytes == 200
    before = tensor.clone()
    region.array[:2] = 0
    region.array[:2] = before.view(torch.uint8).numpy()[:2]
    assert torch.equal(tensor, before)
    tensor[3] = -7
    expected = tensor.view(torch.uint8).numpy().tobytes()
    del tensor
    assert region.buffer.tobytes() == expected
    with pytest.raises(ValueError, match="contiguous"):
        agent.register(torch.zeros(4, 4).t()[:, 1:])
    with pytest.raises(ValueError, match="zero bytes"):
        agent.register(torch.zeros(0))
    assert agent.register(torch.zeros(4, 4)[1:2]).nbytes == 16
    region.close()


async def test_an_agent_reads_itself(agent: TransferAgent) -> None:
    region = agent.allocate(4096, "both")
    region.array[:1000] = 5
    me = await agent.connect(agent.describe())
    report = await me.read([Span(region.id, 2000, 1000)], [Span(region.id, 0, 1000)], deadline_s=30)
    assert report.transport == "local"
    assert (region.array[2000:3000] == 5).all()


async def test_ids_are_never_used_again(agent: TransferAgent) -> None:
    seen = set()
    # More than there are slots, so that slots are used again.
    for _ in range(MAX_OPEN_REGIONS + 50):
        with agent.allocate(1, "short") as region:
            assert region.id not in seen
            seen.add(region.id)
        with pytest.raises(RegionError):
            agent.regions.get(region.id)
    agent.regions.check_integrity()


async def test_a_closed_agent_registers_nothing() -> None:
    from moonpool.runtime.config.options import TransferOptions

    agent = await TransferAgent.start(TransferOptions(), agent_id="short-lived", epoch=1)
    region = agent.allocate(4096, "left open")
    await agent.close()
    assert region.closed
    with pytest.raises(AgentClosed):
        agent.allocate(4096, "late")
    region.array[:] = 1


async def test_holds_are_stopped_and_waited_for(agent: TransferAgent) -> None:
    region = agent.allocate(4096, "held")
    stopped: list[RegionError] = []

    def stop(error: RegionError) -> None:
        stopped.append(error)
        hold.release()
        hold.release()

    hold = agent.regions.hold([region.id], stop)
    region.close()
    assert len(stopped) == 1
    with pytest.raises(RegionError):
        agent.regions.hold([region.id], stop)
    with pytest.raises(SpanError):
        agent.regions.addresses(_spans(region.id), writable=False)


def _spans(region_id: int):  # type: ignore[no-untyped-def]
    from moonpool.transfer import Spans

    return Spans.of([Span(region_id, 0, 1)])


def test_advice_the_kernel_does_not_know_is_no_error() -> None:
    allocated = memory.allocate(4096, "test", "anonymous")
    assert not libc.madvise(memory.address_of(allocated.array), 4096, 9999)


def test_a_second_copying_thread_must_earn_its_core() -> None:
    lanes = ThreadTuner(2)
    for speeds, expected in (({1: 10e9, 2: 11e9}, 1), ({1: 10e9, 2: 16e9}, 2), ({1: 10e9, 2: 5e9}, 1)):
        for _ in range(200):
            choice = lanes.choose()
            lanes.record(choice, speeds[choice])
        most = [lanes.choose() for _ in range(31)]
        assert most.count(expected) >= 29
    assert ThreadTuner(1).choose() == 1
