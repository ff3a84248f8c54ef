"""Finding the CUDA runtime, its forms, and that no processor ever touches device memory.

Over the stand-in for the runtime; ``test_conformance`` has what device memory shares with any other.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moonpool.bench.transfer.device_memory import DeviceBuffer
from moonpool.transfer import (
    NoPath,
    RegionError,
    TransferReport,
)
from moonpool.transfer.copying.memcpy import copy_from
from moonpool.transfer.native import cuda as library
from moonpool.transfer.native.arrays import address_of
from moonpool.transfer.native.compiled_copy import NEVER
from moonpool.transfer.native.cuda import CudaError, CudaUnavailable, load_cuda
from moonpool.transfer.native.ucx import load_ucx
from tests.transfer.conftest import StartPeer
from tests.transfer.cuda.memory import NBYTES, addresses, connected, counts, halves
from tests.transfer.device import DeviceRegion, stand_in, use_stand_in
from tests.transfer.faults import outcome, start_here
from tests.transfer.peer_process import pattern


def test_a_processor_that_touches_device_memory_dies(environment: dict[str, str]) -> None:
    """So that a direct access is seen in every other test here."""
    touch = (
        "import ctypes; from moonpool.bench.transfer.device_memory import DeviceBuffer; "
        "from moonpool.transfer.native.cuda import load_cuda; "
        "ctypes.string_at(DeviceBuffer(load_cuda(), 64).address, 1)"
    )
    process = subprocess.run([sys.executable, "-c", touch], cwd=Path(__file__).parents[3], check=False)
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
