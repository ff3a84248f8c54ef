"""What an agent that has device memory keeps for it."""

from __future__ import annotations

import logging

from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.staging import StagingPool
from moonpool.transfer.native.cuda import Cuda, CudaError, CudaUnavailable

_log = logging.getLogger(__name__)


class CudaRegions:
    """Belongs to the event loop's thread, but for ``staging``."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        """device: what it does on no device of its regions, it does on this one."""
        self.cuda = cuda
        self.device = device
        self.staging = StagingPool(cuda)
        self._handles: dict[int, bytes] = {}

    def handle(self, region: Region) -> bytes:
        """What a process on this host needs to map a region in device memory: see ``IpcMemory``.

        Empty where the driver has no handle for it.
        """
        if region.id not in self._handles:
            self._handles[region.id] = self._export(region)
        return self._handles[region.id]

    def _export(self, region: Region) -> bytes:
        assert region.device is not None
        try:
            with self.cuda.on(region.device):
                handle, offset = self.cuda.export(region.address)
        except (CudaError, CudaUnavailable) as error:
            _log.info("region %d goes through host memory, also on this host: %s", region.id, error)
            return b""
        return handle + offset.to_bytes(8, "little")

    def forget(self, region_id: int) -> None:
        """It is closed, and nobody reads it any more."""
        self._handles.pop(region_id, None)

    def pin(self, region: Region) -> None:
        """Make copies between allocated host memory and devices fast, until the region is closed."""
        if region.backing not in ("anonymous", "memfd"):
            return
        try:
            self.cuda.pin(region.address, region.nbytes)
        except CudaError as error:
            _log.warning(
                "host memory of region %d could not be locked, so copies take longer: %s", region.id, error
            )
        else:
            region.on_closed = lambda: self._unpin(region)

    def _unpin(self, region: Region) -> None:
        try:
            self.cuda.unpin(region.address)
        except CudaError as error:
            # After an error of the device nothing can be undone, and the memory is given up all the same.
            _log.error("region %d stays locked: %s", region.id, error)

    def close(self) -> None:
        """Nothing moves any more."""
        self.staging.close()
