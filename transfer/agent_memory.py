"""The memory of an agent: its regions, and what peers are told and sent of them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.network.sockets import loopback_only
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.peer_memory import LIFELINE_ID
from moonpool.transfer.memory import allocation
from moonpool.transfer.memory.adoption import SupportsCuda, SupportsDLPack, adopt, adopt_device, is_on_device
from moonpool.transfer.memory.checksum import Checksums
from moonpool.transfer.memory.closed_regions import ClosedRegions
from moonpool.transfer.memory.device_regions import CudaRegions
from moonpool.transfer.memory.lifeline import Lifeline, readable_by_peers
from moonpool.transfer.memory.region import Region, RegionTable
from moonpool.transfer.native.compiled_copy import compiled_copy
from moonpool.transfer.native.cuda import load_cuda
from moonpool.transfer.native.ledger import new_ledger
from moonpool.transfer.native.ucx import load_ucx
from moonpool.transfer.paths.ucx.mapped_regions import UcxRegions
from moonpool.transfer.paths.ucx.worker import UcxWorker

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)
# A running peer releases a region within milliseconds.
_RELEASE_S = 1.0
# Device memory that peers still have mapped must not be freed.
_leaked: list[Region] = []


def pool_backing(options: TransferOptions, *, with_ucx: bool) -> allocation.Backing:
    """The backing of allocated regions.

    A memfd, if peers on this host map it and copy with the compiled copy. Otherwise anonymous memory: copies
    through the kernel, as UCX makes them, need its huge pages.
    """
    if not readable_by_peers():
        return "memfd"
    mapped = "shm" in options.transports and not with_ucx and compiled_copy() is not None
    return "memfd" if mapped else "anonymous"


class AgentMemory:
    """Belongs to the event loop's thread, except where ``RegionTable`` says otherwise."""

    def __init__(
        self,
        options: TransferOptions,
        incarnation: bytes,
        readers: AbstractSet[Hashable],
        on_closed: Callable[[int], None],
    ) -> None:
        """readers: the agent's current control connections. on_closed: called with a closed region's id."""
        self.lifeline = Lifeline(incarnation)
        # Serves small requests of peers.
        self.ledger = new_ledger()
        self.regions = RegionTable(self.lifeline.open_ids, self._publish, self._closed)
        self._readers = readers
        self._on_closed = on_closed
        self.ucx = self._start_ucx(options) if "ucx" in options.transports else None
        self._backing = pool_backing(options, with_ucx=self.ucx is not None)
        self._unmapped: list[Region] = []
        self.cuda: CudaRegions | None = None
        """Set with the first region in device memory, because CUDA itself takes some."""
        self.closed_regions = ClosedRegions(self._forget)

    def _start_ucx(self, options: TransferOptions) -> UcxRegions | None:
        ucx = load_ucx()
        if ucx is None:
            _log.warning("transfer.transports names ucx, but there is no libucp: pip install moonpool[ucx]")
            return None
        if not loopback_only(options.tcp.host):
            _log.warning("UCX opens ports of its own without authentication: use closed networks only")
        return UcxRegions(UcxWorker(ucx), self.lifeline)

    def allocate(self, nbytes: int, name: str, mapped: bool) -> Region:
        """See ``TransferAgent.allocate``."""
        if nbytes <= 0:
            raise ValueError(f"a region needs at least one byte, not {nbytes}")
        region = self._add(name, allocation.allocate(nbytes, name, self._backing, mapped=mapped), True)
        if not mapped:
            self._unmapped.append(region)
        return region

    async def map_pages(self) -> None:
        """See ``TransferAgent.map_pages``."""
        while self._unmapped:
            region = self._unmapped.pop()
            for part in allocation.map_steps(region.nbytes):
                if region.closed:
                    break
                await asyncio.to_thread(allocation.map_pages, region.array[part])

    def register(
        self,
        buffer: Buffer | SupportsDLPack | SupportsCuda,
        name: str,
        writable: bool,
        checksums: Checksums | None = None,
    ) -> Region:
        """See ``TransferAgent.register``."""
        if is_on_device(buffer):
            return self._register_on_device(buffer, name, writable, checksums)
        return self._add(name, adopt(buffer, writable), writable)

    def register_shared(self, fd: int, name: str) -> Region:
        """See ``TransferAgent.register_shared``."""
        return self._add(name, allocation.adopt_shared(fd), True)

    def _register_on_device(
        self, buffer: object, name: str, writable: bool, checksums: Checksums | None
    ) -> Region:
        cuda = load_cuda() if self.cuda is None else self.cuda.cuda
        region = self.regions.add(name, adopt_device(buffer, writable, cuda), writable)
        if self.cuda is None:
            assert region.device is not None
            self.cuda = CudaRegions(cuda, region.device)
            self.regions.staging = self.cuda.staging
            for other in self.regions:
                self.cuda.pin(other)
        if checksums is not None:
            hashers = self.cuda.staging.hashers
            hashers[region.address] = region.nbytes, checksums
            region.on_closed = lambda: hashers.pop(region.address, None)
        return region

    def _add(self, name: str, memory: allocation.Memory, writable: bool) -> Region:
        region = self.regions.add(name, memory, writable)
        try:
            if self.ucx is not None:
                self.ucx.add(region)
            if self.cuda is not None:
                self.cuda.pin(region)
        except BaseException:
            region.close()
            raise
        return region

    def info(self, region_id: int) -> RegionInfo:
        """What peers are told of a region, open or not."""
        if region_id == LIFELINE_ID and self.ucx is not None:
            return self.ucx.lifeline_info()
        region = self.regions.find(region_id)
        if region is None:
            return RegionInfo(region_id, False, False, False, 0, 0)
        on_device = region.device is not None and self.cuda is not None
        return RegionInfo(
            region_id,
            open=True,
            writable=region.writable,
            shared=region.fd >= 0,
            nbytes=region.nbytes,
            address=region.address,
            key=b"" if self.ucx is None else self.ucx.key(region_id),
            on_device=on_device,
            ipc=self.cuda.handle(region) if on_device and self.cuda is not None else b"",
        )

    def send_memfd(self, sock: socket.socket, region_id: int) -> None:
        """Send a region's memfd, if it has one, over ``sock``, and close that."""
        with sock:
            region = self.regions.find(region_id)
            fd = self.lifeline.fd if region_id == LIFELINE_ID else -1 if region is None else region.fd
            if fd >= 0 and sock.family == socket.AF_UNIX:
                # Allocated memory is sealed against writes by others. What processes of ours share is not.
                readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    # A descriptor needs a byte to accompany it. The buffer is empty: this cannot block.
                    socket.send_fds(sock, [b"\0"], [readable])
                finally:
                    os.close(readable)

    def _forget(self, region_id: int) -> None:
        if self.ucx is not None:
            self.ucx.forget(region_id)
        if self.cuda is not None:
            self.cuda.forget(region_id)

    def _publish(self, region: Region) -> None:
        self.lifeline.publish(region)
        if self.ledger is not None and region.device is None:
            self.ledger.region(region.id, region.address, region.nbytes, writable=region.writable)

    def _closed(self, region: Region) -> None:
        if self.ledger is not None:
            self.ledger.region(region.id, 0, 0)
        if self.ucx is not None or region.device is not None:
            self.closed_regions.add(region, set(self._readers))
        self._on_closed(region.id)

    async def withdraw(self) -> None:
        """Close the regions in device memory, and wait until no process has them mapped.

        Memory that a peer keeps mapped (its process may be stopped) is never freed.
        """
        for region in self.regions:
            if region.device is not None:
                region.close()
        mapped = await self.closed_regions.on_devices_released(_RELEASE_S)
        if mapped:
            _log.warning("%d regions of device memory are kept: peers still have them mapped", len(mapped))
            _leaked.extend(mapped)

    def close(self) -> None:
        """Close all regions. Call when no connection is left and nothing is in progress."""
        self.regions.close()
        if self.ucx is not None:
            self.ucx.close()
        if self.cuda is not None:
            self.cuda.close()
        self.lifeline.close()
