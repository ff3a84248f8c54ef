"""The path between devices of two processes of one host: device memory mapped by CUDA IPC."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence

from moonpool.runtime.cancellation import outlast
from moonpool.transfer.connections.handshake import Identity
from moonpool.transfer.connections.wire import Op, RegionInfo
from moonpool.transfer.copying.batch_request import Direction
from moonpool.transfer.copying.device import direct_copy
from moonpool.transfer.copying.peer_memory import CopySource, PeerMemory, Witness
from moonpool.transfer.copying.pool import CopyPool
from moonpool.transfer.errors import PathFailed
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.memory.device_regions import CudaRegions
from moonpool.transfer.memory.region import Hold, Region
from moonpool.transfer.native.arrays import U64
from moonpool.transfer.native.compiled_copy import Stop
from moonpool.transfer.native.cuda import IPC_HANDLE_NBYTES, Cuda, CudaError
from moonpool.transfer.paths.shm import ShmPath
from moonpool.transfer.paths.tcp.stream_path import StreamPath

_CHUNK_NBYTES = 1 << 30
_CHUNK_ROWS = 16 * 1024
_MAX_OFFSET = 1 << 48

_log = logging.getLogger(__name__)


class _Mapping:
    """A reference to a mapped allocation of another process."""

    def __init__(self, cuda: Cuda, device: int, handle: bytes) -> None:
        """Raises CudaError."""
        self.address = _OPENED.acquire(cuda, device, handle)
        self.close = weakref.finalize(self, _OPENED.release, cuda, device, handle)
        # The process's end unmaps everything.
        self.close.atexit = False


class _Opened:
    """The mapped allocations, with reference counts: a process can map each only once. Thread-safe."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, bytes], list[int]] = {}
        # Reentrant: the garbage collector may end one mapping while the same thread makes another.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._maps)

    def acquire(self, cuda: Cuda, device: int, handle: bytes) -> int:
        with self._lock:
            entry = self._maps.get((device, handle))
            if entry is None:
                with cuda.on(device):
                    entry = self._maps[device, handle] = [cuda.open(handle), 0]
            entry[1] += 1
            return entry[0]

    def release(self, cuda: Cuda, device: int, handle: bytes) -> None:
        with self._lock:
            entry = self._maps[device, handle]
            entry[1] -= 1
            if entry[1] == 0:
                del self._maps[device, handle]
                with cuda.on(device):
                    cuda.close(entry[0])


_OPENED = _Opened()


class IpcMemory:
    """A ``PeerMemory``: the peer's regions in device memory."""

    def __init__(self, host: PeerMemory, cuda: Callable[[], CudaRegions | None]) -> None:
        """host: the peer's host memory, for its lifeline. cuda: returns ours once there is one."""
        self._host = host
        self._cuda = cuda
        self._mappings: dict[int, _Mapping] = {}

    async def reach(self, region: RegionInfo) -> bool:
        cuda = self._cuda()
        if cuda is None or len(region.ipc) != IPC_HANDLE_NBYTES + 8:
            return False
        if region.id in self._mappings:
            return True
        handle, offset = region.ipc[:IPC_HANDLE_NBYTES], _offset(region)
        if offset >= _MAX_OFFSET:
            return False
        # Takes milliseconds for a large allocation.
        opening = asyncio.ensure_future(asyncio.to_thread(_Mapping, cuda.cuda, cuda.device, handle))
        try:
            mapping = await _wait_for(opening)
        except CudaError as error:
            _log.info("region %d of a peer cannot be mapped: %s", region.id, error)
            return False
        self._mappings[region.id] = mapping
        return True

    def locate(self, regions: Sequence[RegionInfo], hold: Hold) -> CopySource:
        cuda = self._cuda()
        assert cuda is not None
        maps = {region.id: self._mappings[region.id] for region in regions}
        bases = {region.id: maps[region.id].address + _offset(region) for region in regions}
        direct = direct_copy(functools.partial(cuda.staging.borrow, cuda.device))

        def copy(to: U64, source: U64, nbytes: U64, stop: Stop, digests: U64 | None) -> bool:
            try:
                return direct(to, source, nbytes, stop, digests)
            except CudaError as error:
                # As for host memory: the path then checks the peer, and another path may succeed.
                raise OSError(errno.EFAULT, str(error)) from error

        return CopySource(copy, bases, list(maps.values()))

    def lifeline(self, region_ids: Sequence[int]) -> bytes:
        return self._host.lifeline(region_ids)

    def mapping(self, region_id: int) -> None:
        """Nothing that the processor can read."""

    def witness(self) -> Witness | None:
        return self._host.witness()

    def forget(self, region_id: int) -> None:
        # A running copy keeps the mapping.
        self._mappings.pop(region_id, None)

    def close(self) -> None:
        self._mappings.clear()
        self._host.close()


def _offset(region: RegionInfo) -> int:
    """Offset of the region in its allocation."""
    return int.from_bytes(region.ipc[IPC_HANDLE_NBYTES:], "little")


async def _wait_for(opening: asyncio.Future[_Mapping]) -> _Mapping:
    """Wait for a mapping. When cancelled, wait too and unmap: the peer may wait for that to free memory."""
    try:
        return await outlast(opening)
    except asyncio.CancelledError:
        if opening.exception() is None:
            opening.result().close()
        raise


class CudaIpcPath(ShmPath):
    """Copies between devices. As over shm the target reads a write, here from our device memory.

    Regions that cannot be mapped are left to other paths.
    """

    name = "cuda-ipc"
    for_devices = True

    def __init__(
        self,
        pool: CopyPool,
        peer: Identity,
        memory: IpcMemory,
        region: Callable[[int], RegionInfo | None],
        writes: StreamPath | None,
        cuda: Callable[[], CudaRegions | None],
    ) -> None:
        """writes: None for a peer that is only read."""
        super().__init__(pool, peer, memory, region, writes)
        self._cuda = cuda

    def carries(self, direction: Direction, ours: Sequence[Region], theirs: Sequence[RegionInfo]) -> bool:
        cuda = self._cuda()
        if cuda is None:
            return False
        if direction == "read":
            return all(region.ipc and region.id not in self._unreachable for region in theirs)
        assert self._streams is not None
        fetched = self._streams.device_write_op is Op.FETCH
        return fetched and all(region.device is not None and cuda.handle(region) for region in ours)

    def chunking(
        self, direction: Direction, nbytes: int, verified: bool, region_ids: Sequence[int]
    ) -> Chunking:
        if direction == "write" or verified:
            return super().chunking(direction, nbytes, verified, region_ids)
        # Each chunk is waited for, and a device moves a gigabyte in a millisecond.
        return Chunking(_CHUNK_NBYTES, _CHUNK_ROWS)

    async def open(self, direction: Direction, region_ids: Sequence[int]) -> None:
        await super().open(direction, region_ids)
        if direction == "read" and self._unreachable.intersection(region_ids):
            raise PathFailed(self.name, "the peer's device memory cannot be mapped here", interrupted=True)
