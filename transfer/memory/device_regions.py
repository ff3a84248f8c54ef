"""An agent's regions in device memory: CUDA IPC handles, pinned host memory and stagings."""

from __future__ import annotations

import logging

from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.staging import StagingPool
from moonpool.transfer.native.cuda import Cuda, CudaError, CudaUnavailable

_log = logging.getLogger(__name__)


class CudaRegions:
    """Belongs to the event loop's thread, except ``staging``."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        """device: its context pins host memory and makes copies between that and other devices."""
        self.cuda = cuda
        self.device = device
        self.staging = StagingPool(cuda)
        self._handles: dict[int, bytes] = {}

    def handle(self, region: Region) -> bytes:
        """What ``IpcMemory`` needs to map a region in device memory; empty if the driver has no handle."""
        if region.id not in self._handles:
            self._handles[region.id] = self._export(region)
        return self._handles[region.id]

    def _export(self, region: Region) -> bytes:
        assert region.device is not None
        try:
            with self.cuda.on(region.device):
                handle, offset = self.cuda.export(region.address)
        except (CudaError, CudaUnavailable) as error:
            _log.info("region %d is copied through host memory, even on this host: %s", region.id, error)
            return b""
        return handle + offset.to_bytes(8, "little")

    def forget(self, region_id: int) -> None:
        """The region is closed, and no peer reads it any more."""
        self._handles.pop(region_id, None)

    def pin(self, region: Region) -> None:
        """Pin allocated host memory until the region is closed, which makes device copies fast."""
        if region.backing not in ("anonymous", "memfd"):
            return
        try:
            # On another device, which may be the thread's current one, pinning would allocate memory.
            with self.cuda.on(self.device):
                self.cuda.pin(region.address, region.nbytes)
        except CudaError as error:
            _log.warning(
                "host memory of region %d could not be pinned, so copies are slower: %s", region.id, error
            )
        else:
            region.on_closed = lambda: self._unpin(region)

    def _unpin(self, region: Region) -> None:
        try:
            with self.cuda.on(self.device):
                self.cuda.unpin(region.address)
        except CudaError as error:
            # Happens after a device error. The memory is freed regardless.
            _log.error("region %d stays pinned: %s", region.id, error)

    def close(self) -> None:
        """No batch is in progress any more."""
        self.staging.close()
