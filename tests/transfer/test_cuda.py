"""What is CUDA's own: finding it, which way device memory goes, and that no processor ever touches it.

Over the stand-in for the runtime; ``test_conformance`` has what device memory shares with any other.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.bench.transfer.device_memory import DeviceBuffer
from moonpool.transfer import NoPath, Peer, PeerLost, RegionError, Span, TransferAgent, TransferReport
from moonpool.transfer.copying.memcpy import copy_from, copy_here
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.staging import SLOT_NBYTES, Staging
from moonpool.transfer.native import cuda as library
from moonpool.transfer.native.arrays import U64, address_of
from moonpool.transfer.native.compiled_copy import NEVER
from moonpool.transfer.native.cuda import Cuda, CudaError, CudaUnavailable, load_cuda
from moonpool.transfer.native.ucx import load_ucx
from tests.transfer.conftest import RemotePeer, StartPeer
from tests.transfer.device import DeviceRegion, Owned, stand_in, use_gpu, use_stand_in
from tests.transfer.faults import GRACE_S, Proxy, late, outcome, settled, start_here
from tests.transfer.peer_process import pattern

NBYTES = 8 << 20


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return use_stand_in(monkeypatch)


def counts() -> dict[str, int]:
    """What there is in the stand-in of this process."""
    gc.collect()
    values = (ctypes.c_long * 5)()
    ctypes.CDLL(stand_in()).stand_in_counts(values)
    return dict(zip(("allocations", "imported", "pinned", "streams", "events"), values, strict=True))


def addresses(*values: int) -> U64:
    return np.array(values, np.uint64)


def halves(region: Region | DeviceRegion | int, nbytes: int = NBYTES) -> list[Span]:
    region_id = region if isinstance(region, int) else region.id
    return [Span(region_id, 0, nbytes // 2), Span(region_id, nbytes // 2, nbytes - nbytes // 2)]


async def connected(agent: TransferAgent, theirs: RemotePeer, seed: int = 1) -> tuple[Peer, int]:
    """A peer and its region in a device's memory."""
    remote = (await theirs.do("allocate_on_device", nbytes=NBYTES, seed=seed))["region"]
    return await agent.connect(theirs.descriptor), int(remote)


# ------------------------------------------------------------------ the processor keeps out


def test_a_processor_that_touches_device_memory_dies(environment: dict[str, str]) -> None:
    """So that a direct access is seen in every other test here."""
    touch = (
        "import ctypes; from moonpool.bench.transfer.device_memory import DeviceBuffer; "
        "from moonpool.transfer.native.cuda import load_cuda; "
        "ctypes.string_at(DeviceBuffer(load_cuda(), 64).address, 1)"
    )
    process = subprocess.run([sys.executable, "-c", touch], cwd=Path(__file__).parents[2], check=False)
    assert process.returncode == -signal.SIGSEGV


async def test_calls_for_host_memory_refuse_device_memory(environment: dict[str, str]) -> None:
    async with await start_here("local") as agent:
        region = DeviceRegion(agent, 4096).region
        assert region.device == 0
        assert region.backing == "cuda"
        for use in (lambda: region.array, lambda: region.buffer):
            with pytest.raises(RegionError, match="memory of CUDA device 0"):
                use()
        # The kernel does, where addresses are not looked at before.
        host = np.zeros(4096, np.uint8)
        one, other, size = addresses(region.address), addresses(address_of(host)), addresses(4096)
        for to, source in ((one, other), (other, one)):
            with pytest.raises(OSError) as caught:
                copy_from(os.getpid(), to, source, size, NEVER)
            assert caught.value.errno == errno.EFAULT


async def test_ucx_is_never_given_device_memory(environment: dict[str, str], start_peer: StartPeer) -> None:
    if load_ucx() is None:
        pytest.skip("there is no libucp: pip install moonpool[ucx]")
    theirs = start_peer("ucx,tcp", **environment)
    for transports, way in (("ucx,tcp", "tcp"), ("ucx", "")):
        async with await start_here(transports) as agent:
            peer, remote = await connected(agent, theirs)
            host, device = agent.allocate(NBYTES, "host"), DeviceRegion(agent, NBYTES)
            theirs_host = (await theirs.do("allocate", nbytes=NBYTES, seed=2))["region"]
            assert (await peer.read(halves(host), halves(theirs_host), deadline_s=5)).transport == "ucx"
            for ours, there in ((host, remote), (device, remote), (device, theirs_host)):
                for move in (peer.read, peer.write):
                    result, _ = await outcome(move(halves(ours), halves(there), deadline_s=5))
                    if way:
                        assert isinstance(result, TransferReport) and result.transport == way
                    else:
                        assert isinstance(result, NoPath) and "transfer.transports" in str(result)


# ------------------------------------------------------------------ finding the runtime


def test_without_a_runtime_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MOONPOOL_CUDART", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    monkeypatch.setattr(library, "_SYSTEM", ())
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda _: None)
    load_cuda.cache_clear()
    with pytest.raises(CudaUnavailable, match="pip install nvidia-cuda-runtime"):
        load_cuda()
    nothing = tmp_path / "libcudart.so.13"
    nothing.write_text("no library")
    monkeypatch.setenv("MOONPOOL_CUDART", str(nothing))
    with pytest.raises(CudaUnavailable, match=str(nothing)):
        load_cuda()


def test_the_runtime_of_a_wheel_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_stand_in(monkeypatch)
    monkeypatch.delenv("MOONPOOL_CUDART")
    wheel = tmp_path / "nvidia" / "cu13" / "lib"
    wheel.mkdir(parents=True)
    shutil.copy(stand_in(), wheel / "libcudart.so.13")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda _: spec)
    assert load_cuda().path == str(wheel / "libcudart.so.13")
    assert load_cuda().version == (13, 0)


@pytest.mark.parametrize("version", [12060, 12080, 13000])
def test_batches_of_copies_in_each_form_there_is(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    use_stand_in(monkeypatch, VERSION=version)
    cuda = load_cuda()
    assert (cuda._batch is None) == (version < 12080)
    with DeviceBuffer(cuda, 4096) as one, DeviceBuffer(cuda, 4096) as other:
        one.write(0, pattern(4096, 1))
        at = np.random.default_rng(2).permutation(64).astype(np.uint64) * np.uint64(64)
        stream = cuda.new_stream()
        to, source = at + np.uint64(other.address), np.sort(at) + np.uint64(one.address)
        cuda.copy(to, source, np.full(64, 64, np.uint64), stream)
        cuda.wait_for_stream(stream)
        moved = other.read(0, 4096).reshape(64, 64)[(at // np.uint64(64)).astype(np.intp)]
        assert np.array_equal(moved.reshape(-1), pattern(4096, 1))
        with pytest.raises(CudaError, match="cudaMemcpy"):
            cuda.copy(addresses(one.address + 4090), addresses(other.address), addresses(8), stream)
        cuda.destroy_stream(stream)


async def test_callers_keep_their_device_and_hear_no_errors_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch, NO_IPC=1)
    runtime = ctypes.CDLL(stand_in())
    async with await start_here("local") as agent:
        memory = DeviceRegion(agent, NBYTES, device=1)
        assert memory.region.device == 1
        me = await agent.connect(agent.describe())
        assert agent.region_info(memory.id).ipc == b""
        await me.read(halves(agent.allocate(NBYTES, "host")), halves(memory), deadline_s=5)
    assert load_cuda()._integer("cudaGetDevice") == 0
    assert runtime.cudaGetLastError() == 0


# ------------------------------------------------------------------ what can be registered


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


# ------------------------------------------------------------------ which way


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


# ------------------------------------------------------------------ the bounce


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


# ------------------------------------------------------------------ on a GPU


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


# ------------------------------------------------------------------ ends


@pytest.mark.parametrize("transport", ["cuda-ipc", "shm", "tcp"])
@pytest.mark.parametrize("direction", ["read", "write"])
async def test_a_killed_peer_is_lost_and_memory_left_alone(
    monkeypatch: pytest.MonkeyPatch, start_peer: StartPeer, transport: str, direction: str
) -> None:
    environment = use_stand_in(monkeypatch, COPY_US=20_000)
    theirs = start_peer(transport, **environment)
    imported = counts()["imported"]
    async with await start_here(transport) as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        move = getattr(peer, direction)
        await move(halves(memory), halves(remote), deadline_s=5)
        batch = move(halves(memory), halves(remote), deadline_s=20)
        await asyncio.sleep(0.01)
        theirs.kill()
        result, seconds = await outcome(batch)
        assert isinstance(result, PeerLost)
        assert seconds < 5
        memory.array[:] = 7
        assert peer.lost
        await settled(agent)
        assert (memory.array == 7).all()
        while counts()["imported"] != imported:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("transport", ["local", "cuda-ipc", "shm", "tcp"])
async def test_a_cancelled_read_has_ended_when_the_call_returns(
    monkeypatch: pytest.MonkeyPatch, start_peer: StartPeer, transport: str
) -> None:
    """Copies that were enqueued are waited for, slow as they are."""
    environment = use_stand_in(monkeypatch, COPY_US=50_000)
    async with await start_here(transport) as agent:
        memory = DeviceRegion(agent, NBYTES)
        if transport == "local":
            peer, remote = await agent.connect(agent.describe()), DeviceRegion(agent, NBYTES).id
        else:
            peer, remote = await connected(agent, start_peer(transport, **environment))
        for wait_s in (0.0, 0.02):
            batch = peer.read(halves(memory), halves(remote), deadline_s=5)
            await asyncio.sleep(wait_s)
            batch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await batch
            memory.array[:] = 7
            await settled(agent)
            assert (memory.array == 7).all()


async def test_memory_that_is_mapped_stays_until_it_is_let_go(
    monkeypatch: pytest.MonkeyPatch, start_peer: StartPeer
) -> None:
    """Freed earlier, the stand-in would take it from under the copy: a bus error."""
    environment = use_stand_in(monkeypatch, COPY_US=50_000)
    theirs = start_peer("cuda-ipc", **environment)
    imported = counts()["imported"]
    async with await start_here("cuda-ipc") as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        batch = peer.read(halves(memory), halves(remote), deadline_s=5)
        while not agent.regions._holds:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        await theirs.do("close_region", region=remote)
        result, _ = await outcome(batch)
        assert isinstance(result, RegionError)
        while (  # noqa: ASYNC110
            await theirs.do("count_device_memory")
        )["allocations"] or counts()["imported"] != imported:
            await asyncio.sleep(0.001)


async def test_an_agent_that_closes_frees_nothing_that_is_being_read(
    monkeypatch: pytest.MonkeyPatch, start_peer: StartPeer
) -> None:
    environment = use_stand_in(monkeypatch, COPY_US=50_000)
    theirs = start_peer("cuda-ipc", **environment)
    async with await start_here("cuda-ipc") as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        await peer.read(halves(memory), halves(remote), deadline_s=5)
        batch = peer.read(halves(memory), halves(remote), deadline_s=5)
        while not agent.regions._holds:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(theirs.do("close_agent"))
        result, _ = await outcome(batch)
        assert isinstance(result, RegionError | PeerLost)
        await closing
        assert (await theirs.do("count_device_memory"))["allocations"] == 0


async def test_a_stopped_reader_keeps_nobody_from_closing(
    environment: dict[str, str], start_peer: StartPeer
) -> None:
    """What it has mapped is never freed."""
    reader = start_peer("cuda-ipc", **environment)
    async with await start_here("cuda-ipc") as agent:
        await connected(agent, reader)
        memory = DeviceRegion(agent, NBYTES)
        await reader.do("read_device", descriptor=agent.describe().pack().hex(), region=memory.id)
        reader.signal(signal.SIGSTOP)
        before = counts()["allocations"]
        started = time.monotonic()
        await agent.close()
        assert time.monotonic() - started < 10
        del memory
        assert counts()["allocations"] == before


async def test_a_cancelled_read_leaves_no_map_that_was_just_being_made(
    environment: dict[str, str], start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()
    loop, open_handle = asyncio.get_running_loop(), Cuda.open

    def slowly(self: Cuda, handle: bytes) -> int:
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.1)
        return open_handle(self, handle)

    monkeypatch.setattr(Cuda, "open", slowly)
    before = counts()["imported"]
    theirs = start_peer("cuda-ipc", **environment)
    async with await start_here("cuda-ipc") as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        batch = peer.read(halves(memory), halves(remote), deadline_s=5)
        await begun.wait()
        batch.cancel()
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        del batch
        assert counts()["imported"] == before
        await peer.read(halves(memory), halves(remote), deadline_s=5)
        assert np.array_equal(memory.array, pattern(NBYTES, 1))


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


async def test_a_link_that_is_cut_while_a_device_is_written_to(
    environment: dict[str, str], start_peer: StartPeer
) -> None:
    from dataclasses import replace

    theirs = start_peer("tcp", **environment)
    proxy = Proxy(theirs.descriptor.tcp_port)
    theirs.descriptor = replace(theirs.descriptor, tcp_port=proxy.port)
    async with await start_here("tcp") as agent:
        peer, remote = await connected(agent, theirs)
        memory = DeviceRegion(agent, NBYTES)
        await peer.read(halves(memory), halves(remote), deadline_s=5)
        proxy.hold()
        result, late_s = await late(peer.read(halves(memory), halves(remote), deadline_s=0.3), 0.3)
        assert type(result).__name__ == "DeadlineExceeded"
        assert late_s < GRACE_S
        memory.array[:] = 7
        proxy.release()
        await settled(agent)
        assert (memory.array == 7).all()
    proxy.close()


async def test_nothing_of_the_runtime_is_left(environment: dict[str, str], start_peer: StartPeer) -> None:
    before = counts()
    for turn in range(4):
        theirs = start_peer("cuda-ipc,shm,tcp", **environment)
        async with await start_here(("cuda-ipc", "shm", "tcp", "cuda-ipc")[turn]) as agent:
            peer, remote = await connected(agent, theirs)
            memory = DeviceRegion(agent, NBYTES)
            agent.allocate(4096, "locked")
            await peer.read(halves(memory), halves(remote), deadline_s=5)
            await peer.write(halves(memory), halves(remote), deadline_s=5)
            if turn == 3:
                theirs.kill()
            batch = None if turn == 3 else peer.read(halves(memory), halves(remote), deadline_s=5)
        if batch is not None:
            await outcome(batch)
        del memory, peer, batch
    assert counts() == before
