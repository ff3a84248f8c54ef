"""Which way device memory goes: mapped, or through host memory."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from moonpool.bench.transfer.device_memory import DeviceBuffer
from moonpool.transfer import (
    PeerLost,
    Span,
    checksum,
)
from moonpool.transfer.copying.memcpy import copy_here
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.staging import SLOT_NBYTES, Staging
from moonpool.transfer.native.arrays import U64, address_of
from moonpool.transfer.native.compiled_copy import NEVER
from moonpool.transfer.native.cuda import Cuda, CudaError, load_cuda
from tests.transfer.conftest import StartPeer
from tests.transfer.cuda.memory import NBYTES, addresses, connected, halves
from tests.transfer.device import DeviceRegion, use_stand_in
from tests.transfer.faults import outcome, start_here
from tests.transfer.peer_process import pattern


async def test_the_way_is_chosen_by_where_the_memory_lies(
    environment: dict[str, str], start_peer: StartPeer
) -> None:
    transports = "local,cuda-ipc,shm,tcp"
    theirs = start_peer(transports, **environment)
    async with await start_here(transports) as agent:
        peer, remote = await connected(agent, theirs)
        theirs_host = (await theirs.do("allocate", nbytes=NBYTES, seed=2))["region"]
        host = agent.allocate(NBYTES, "host")

        async def ways(ours: Region | DeviceRegion, there: int) -> tuple[str, str]:
            read = await peer.read(halves(ours), halves(there), deadline_s=5)
            write = await peer.write(halves(ours), halves(there), deadline_s=5)
            return read.transport, write.transport

        # A process without device memory of its own does not begin to use CUDA for a peer's.
        assert await ways(host, remote) == ("shm", "shm")
        assert np.array_equal(host.array, pattern(NBYTES, 1))
        device = DeviceRegion(agent, NBYTES)
        assert await ways(device, remote) == ("cuda-ipc", "cuda-ipc")
        assert np.array_equal(device.array, pattern(NBYTES, 1))
        assert await ways(host, remote) == ("cuda-ipc", "shm")
        assert await ways(device, theirs_host) == ("shm", "cuda-ipc")
        assert np.array_equal(device.array, pattern(NBYTES, 2))
        mixed = [Span(host.id, 0, 999), Span(device.id, 5, 999)]
        for there in (remote, theirs_host):
            await peer.read(mixed, [Span(there, 7, 999), Span(there, 2077, 999)], deadline_s=5)
            await peer.write(mixed, [Span(there, 7, 999), Span(there, 2077, 999)], deadline_s=5)
        assert np.array_equal(device.array[5:1004], pattern(NBYTES, 2)[2077:3076])


@pytest.mark.parametrize("lacking", ["handles", "handles there", "CUDA there"])
async def test_what_cannot_be_mapped_goes_through_host_memory(
    monkeypatch: pytest.MonkeyPatch, start_peer: StartPeer, lacking: str
) -> None:
    """handles: as with torch's expandable segments."""
    transports = "cuda-ipc,shm"
    environment = use_stand_in(monkeypatch, **({"NO_IPC": 1} if lacking == "handles" else {}))
    if lacking == "CUDA there":
        theirs = start_peer(transports, MOONPOOL_CUDART="/nowhere/libcudart.so.13")
    else:
        theirs = start_peer(transports, **environment | {"STAND_IN_NO_IPC": "1"})
    async with await start_here(transports) as agent:
        device = DeviceRegion(agent, NBYTES)
        device.array[:] = pattern(NBYTES, 5)
        command = "allocate" if lacking == "CUDA there" else "allocate_on_device"
        remote = (await theirs.do(command, nbytes=NBYTES, seed=1))["region"]
        peer = await agent.connect(theirs.descriptor)
        # Twice: the first one may find out.
        for _ in range(2):
            report = await peer.write(halves(device), halves(remote), deadline_s=5)
            assert report.transport == ("cuda-ipc" if lacking == "handles there" else "shm")
        found = await theirs.do("checksum", region=remote, offset=0, nbytes=NBYTES)
        device.array[:] = 0
        assert (await peer.read(halves(device), halves(remote), deadline_s=5)).transport == "shm"
        assert np.array_equal(device.array, pattern(NBYTES, 5))
        assert (
            found["checksum"]
            == (await theirs.do("checksum", region=remote, offset=0, nbytes=NBYTES))["checksum"]
        )


async def test_device_memory_without_a_handle_leaves_reads_of_host_memory_verified(
    monkeypatch: pytest.MonkeyPatch, start_peer: StartPeer
) -> None:
    theirs = start_peer("cuda-ipc,shm", **use_stand_in(monkeypatch), STAND_IN_NO_IPC="1")
    async with await start_here("cuda-ipc,shm") as agent:
        peer, on_device = await connected(agent, theirs)
        remote = (await theirs.do("allocate", nbytes=NBYTES, seed=2))["region"]
        host = agent.allocate(NBYTES, "host")
        await peer.read(halves(host), halves(on_device), deadline_s=5)
        blocks = np.split(pattern(NBYTES, 2), 16)
        sums, size = [checksum(block) for block in blocks], len(blocks[0])
        local, there = (
            [Span(region, at, size) for at in range(0, NBYTES, size)] for region in (host.id, remote)
        )
        report = await peer.read(local, there, deadline_s=5, checksums=sums)
        assert report.transport == "shm"
        assert np.array_equal(host.array, pattern(NBYTES, 2))


async def test_a_handle_that_does_not_open_is_tried_once(
    environment: dict[str, str], start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def fail(self: Cuda, handle: bytes) -> int:
        opened.append(handle)
        raise CudaError("cudaIpcOpenMemHandle", 400, "invalid resource handle")

    monkeypatch.setattr(Cuda, "open", fail)
    theirs = start_peer("cuda-ipc,shm", **environment)
    async with await start_here("cuda-ipc,shm") as agent:
        peer, remote = await connected(agent, theirs)
        device = DeviceRegion(agent, NBYTES)
        for _ in range(3):
            assert (await peer.read(halves(device), halves(remote), deadline_s=5)).transport == "shm"
        assert np.array_equal(device.array, pattern(NBYTES, 1))
    assert len(opened) == 1


def test_slots_are_filled_while_others_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch, COPY_US=200_000)
    cuda = load_cuda()
    staging = Staging(cuda, 0)
    with DeviceBuffer(cuda, 3 * SLOT_NBYTES) as buffer:
        source = pattern(3 * SLOT_NBYTES, 1)
        one = addresses(3 * SLOT_NBYTES)

        def seconds_to_the_third() -> float:
            times: list[float] = []

            def fill(slot: U64, there: U64, sizes: U64) -> bool:
                times.append(time.monotonic())
                return copy_here(slot, there, sizes, NEVER)

            assert staging.upload(addresses(buffer.address), addresses(address_of(source)), one, fill)
            return times[2] - times[0]

        # The third was filled before the copy of the first was over; a busy machine has five tries.
        assert any(seconds_to_the_third() < 0.2 for _ in range(5))
        assert np.array_equal(buffer.read(0, buffer.nbytes), source)
    staging.close()


async def test_what_a_device_refuses_goes_another_way(
    environment: dict[str, str], start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = start_peer("cuda-ipc,shm", **environment)
    async with await start_here("cuda-ipc,shm") as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        direct = Staging.copy

        def fail(*_: object) -> bool:
            raise CudaError("cudaMemcpyBatchAsync", 1, "invalid argument")

        monkeypatch.setattr(Staging, "copy", fail)
        assert (await peer.read(halves(memory), halves(remote), deadline_s=5)).transport == "shm"
        monkeypatch.setattr(Staging, "copy", direct)
        ipc = next(record for record in peer.paths._records.values() if record.path.name == "cuda-ipc")
        while not ipc.backoff.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await peer.read(halves(memory), halves(remote), deadline_s=5)).transport == "cuda-ipc"


async def test_another_incarnation_is_never_read_for_the_old_one(
    environment: dict[str, str], start_peer: StartPeer
) -> None:
    transports = "cuda-ipc,tcp"
    old = start_peer(transports, **environment)
    async with await start_here(transports) as agent:
        peer, remote = await connected(agent, old)
        memory = DeviceRegion(agent, NBYTES)
        await peer.read(halves(memory), halves(remote), deadline_s=5)
        old.kill()
        new = start_peer(transports, epoch=2, port=old.descriptor.tcp_port, **environment)
        await connected(agent, new, seed=9)
        result, _ = await outcome(agent.connect(old.descriptor))
        assert type(result).__name__ == "StaleEpoch"
        while not peer.lost:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        with pytest.raises(PeerLost):
            peer.read(halves(memory), halves(remote), deadline_s=5)
