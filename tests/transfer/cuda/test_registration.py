"""What device memory can be registered, by whom, and where it is hashed."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import numpy as np
import pytest

from moonpool.bench.transfer.device_memory import DeviceBuffer
from moonpool.transfer import (
    Span,
    checksum,
)
from moonpool.transfer.memory.staging import Staging
from moonpool.transfer.native.arrays import U64, address_of
from moonpool.transfer.native.cuda import Cuda, load_cuda
from tests.transfer.conftest import StartPeer
from tests.transfer.cuda.memory import NBYTES, connected, counts, halves
from tests.transfer.device import DeviceRegion, Owned, use_gpu
from tests.transfer.faults import start_here
from tests.transfer.peer_process import pattern


class Interface:
    """Something of a library that has device memory."""

    def __init__(self, buffer: DeviceBuffer, **more: Any) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = buffer.__cuda_array_interface__ | more


class Tensor:
    """The same with DLPack alone, as of dlpack.h."""

    def __init__(self, buffer: DeviceBuffer, offset: int, shape: tuple[int, ...]) -> None:
        fields = [(name, ctypes.c_int32) for name in ("device_type", "device_id", "ndim")]
        rest = [("dtype", ctypes.c_uint8 * 4), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p)]
        layout = [("data", ctypes.c_void_p), *fields, *rest, ("byte_offset", ctypes.c_uint64)]
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        kind = type("DLTensor", (ctypes.Structure,), {"_fields_": layout})
        bits32 = (ctypes.c_uint8 * 4)(2, 32, 1, 0)
        shape_at = ctypes.addressof(self._shape)
        self._buffer = buffer
        self._tensor = kind(buffer.address, 2, 0, len(shape), bits32, shape_at, None, offset)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int | None = None) -> object:
        assert stream == -1
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


class TorchTensor(Tensor):
    """As torch exports: only where the tensor's device is the thread's current one."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1

    def __dlpack__(self, *, stream: int | None = None) -> object:
        if (current := load_cuda()._integer("cudaGetDevice")) != 1:
            raise BufferError(
                f"Can't export tensors on a different CUDA device. Expected: 1. Current: {current}"
            )
        return super().__dlpack__(stream=stream)


@pytest.mark.parametrize("thread", ["main", "another"])
async def test_a_tensor_off_device_0_is_registered_by_any_thread(
    environment: dict[str, str], thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = load_cuda()
    pinned_on: list[int] = []

    def pin(self: Cuda, *arguments: int, pin: Any = Cuda.pin) -> None:
        pinned_on.append(self._integer("cudaGetDevice"))
        pin(self, *arguments)

    monkeypatch.setattr(Cuda, "pin", pin)
    tensor = TorchTensor(Owned(cuda, 4096, 1), 0, (64, 16))

    async def register() -> None:
        async with await start_here("local") as agent:
            host = agent.allocate(NBYTES, "host")
            region = agent.register(tensor)
            assert (region.nbytes, region.device) == (4096, 1)
            me = await agent.connect(agent.describe())
            await me.read([Span(host.id, 0, 4096)], [Span(region.id, 0, 4096)], deadline_s=5)
        assert cuda._integer("cudaGetDevice") == 0

    if thread == "main":
        await register()
    else:  # as a rank's thread of commands
        await asyncio.to_thread(lambda: asyncio.run(register()))
    assert set(pinned_on) == {1}


async def test_checksums_are_computed_where_the_memory_is(
    environment: dict[str, str], start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what arrived, with a function of the owner; memory without one is copied to the host."""
    downloads: list[int] = []
    download = Staging.download

    def noting(self: Staging, source: U64, *rest: Any) -> bool:
        downloads.append(int(source[0]))
        return download(self, source, *rest)

    monkeypatch.setattr(Staging, "download", noting)
    theirs = start_peer("tcp", **environment)
    async with await start_here("tcp") as agent:
        buffer, other = Owned(load_cuda(), NBYTES), DeviceRegion(agent, NBYTES)
        asked: list[tuple[list[int], list[int]]] = []

        def hasher(offsets: U64, nbytes: U64) -> U64:
            asked.append((offsets.tolist(), nbytes.tolist()))
            runs = zip(*asked[-1], strict=True)
            return np.array([checksum(buffer.read(at, size)) for at, size in runs], np.uint64)

        region = agent.register(buffer, checksums=hasher)
        peer, remote = await connected(agent, theirs)
        sums = [checksum(half) for half in np.split(pattern(NBYTES, 1), 2)]
        await peer.read(halves(region), halves(remote), deadline_s=5, checksums=sums)
        assert sorted(at for offsets, _ in asked for at in offsets) == [0, NBYTES // 2]
        assert not downloads
        await peer.read(halves(other), halves(remote), deadline_s=5, checksums=sums)
        assert downloads
        region.close()
        assert not agent.memory.cuda.staging.hashers


async def test_what_can_be_registered(environment: dict[str, str]) -> None:
    buffer = Owned(load_cuda(), 4096)
    async with await start_here("local") as agent:
        tensor = Tensor(buffer, 1024, (16, 8))
        region = agent.register(tensor)
        assert (region.address, region.nbytes, region.device) == (buffer.address + 1024, 512, 0)
        matrix = Interface(buffer, shape=(8, 4), typestr="<f4", strides=(16, 4))
        assert agent.register(matrix).nbytes == 128
        host = np.zeros(64, np.uint8)
        for more, message in (
            ({"shape": (8, 4), "typestr": "<f4", "strides": (32, 4)}, "contiguous"),
            ({"shape": (0,)}, "zero bytes"),
            ({"data": (buffer.address, True)}, "read-only"),
            ({"data": (address_of(host), False), "shape": (64,)}, "not in one device's memory"),
            ({"shape": (4097,)}, "not in one device's memory"),
        ):
            with pytest.raises(ValueError, match=message):
                agent.register(Interface(buffer, **more))
        read_only = agent.register(Interface(buffer, data=(buffer.address, True)), writable=False)
        assert not read_only.writable


@pytest.mark.slow
async def test_host_regions_are_locked_while_there_are_device_regions(environment: dict[str, str]) -> None:
    before = counts()["pinned"]
    async with await start_here("local") as agent:
        earlier = agent.allocate(NBYTES, "earlier")
        agent.register(np.zeros(64, np.uint8), name="not ours to lock")
        assert counts()["pinned"] == before
        DeviceRegion(agent, 64)
        assert counts()["pinned"] == before + 1
        agent.allocate(NBYTES, "later")
        assert counts()["pinned"] == before + 2
        earlier.close()
        assert counts()["pinned"] == before + 1
    assert counts()["pinned"] == before


@pytest.mark.gpu
async def test_a_tensor_of_torch_is_a_pool_for_peers(start_peer: StartPeer) -> None:
    """A part of what its allocator took of the device, written by a kernel just before."""
    environment = use_gpu()
    torch = pytest.importorskip("torch")
    theirs = start_peer("cuda-ipc", **environment)
    async with await start_here("cuda-ipc") as agent:
        torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")
        pool = torch.zeros((8, NBYTES // 8), dtype=torch.uint8, device="cuda")
        region = agent.register(pool)
        assert (region.address, region.nbytes) == (pool.data_ptr(), NBYTES)
        peer, remote = await connected(agent, theirs)
        assert (await peer.read(halves(region), halves(remote), deadline_s=10)).transport == "cuda-ipc"
        assert np.array_equal(pool.cpu().numpy().reshape(-1), pattern(NBYTES, 1))
        for turn in range(20):
            pool.fill_(turn)
            torch.cuda.current_stream().synchronize()
            await peer.write(halves(region), halves(remote), deadline_s=10)
            await peer.read(halves(region), halves(remote), deadline_s=10)
            assert bool((pool == turn).all())
