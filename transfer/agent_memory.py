"""The memory of an agent: its regions, and what peers are told and given of them."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.network.sockets import loopback_only
from moonpool.transfer.connections.control import Control
from moonpool.transfer.connections.local_link import LocalLink
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.peer_memory import LIFELINE_ID
from moonpool.transfer.memory import allocation as memory
from moonpool.transfer.memory.adoption import SupportsCuda, SupportsDLPack, adopt, adopt_device, is_on_device
from moonpool.transfer.memory.closed_regions import Lingering
from moonpool.transfer.memory.device_regions import CudaRegions
from moonpool.transfer.memory.lifeline import Lifeline, readable_by_peers
from moonpool.transfer.memory.region import Region, RegionTable
from moonpool.transfer.native.compiled_copy import mover
from moonpool.transfer.native.cuda import load_cuda
from moonpool.transfer.native.ucx import load_ucx
from moonpool.transfer.paths.ucx.mapped_regions import UcxRegions
from moonpool.transfer.paths.ucx.worker import UcxWorker

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)
# A peer answers in milliseconds, if at all.
_LET_GO_S = 1.0
_kept: list[Region] = []


def pool_backing(options: TransferOptions, *, with_ucx: bool) -> memory.Backing:
    """A memfd, where peers on this host map it and the compiled copy makes that the faster way. Else
    anonymous memory, which has huge pages: who copies through the kernel, as UCX does, needs them.
    """
    if not readable_by_peers():
        return "memfd"
    mapped = "shm" in options.transports and not with_ucx and mover() is not None
    return "memfd" if mapped else "anonymous"


class AgentMemory:
    """Belongs to the event loop's thread, but for what ``RegionTable`` says."""

    def __init__(self, options: TransferOptions, incarnation: bytes, controls: set[Control]) -> None:
        """controls: the connections there are, kept up to date by the agent."""
        self.lifeline = Lifeline(incarnation)
        self.regions = RegionTable(self.lifeline.open_ids, self.lifeline.place, self._closed)
        self.local_links: set[LocalLink] = set()
        self._controls = controls
        self.ucx = self._start_ucx(options) if "ucx" in options.transports else None
        self._backing = pool_backing(options, with_ucx=self.ucx is not None)
        self.cuda: CudaRegions | None = None
        """From the first region in a device's memory on: using CUDA costs a process some of that."""
        self._lingering = Lingering(self._forget)

    def _start_ucx(self, options: TransferOptions) -> UcxRegions | None:
        ucx = load_ucx()
        if ucx is None:
            _log.warning("transfer.transports names ucx, but there is no libucp: pip install moonpool[ucx]")
            return None
        if not loopback_only(options.tcp.host):
            _log.warning("UCX has ports of its own and trusts whoever reaches them: closed networks only")
        return UcxRegions(UcxWorker(ucx), self.lifeline)

    def allocate(self, nbytes: int, name: str) -> Region:
        """See ``TransferAgent.allocate``."""
        if nbytes <= 0:
            raise ValueError(f"a region needs at least one byte, not {nbytes}")
        return self._add(name, memory.allocate(nbytes, name, self._backing), True)

    def register(self, buffer: Buffer | SupportsDLPack | SupportsCuda, name: str, writable: bool) -> Region:
        """See ``TransferAgent.register``."""
        if is_on_device(buffer):
            return self._register_on_device(buffer, name, writable)
        return self._add(name, adopt(buffer, writable), writable)

    def register_shared(self, fd: int, name: str) -> Region:
        """See ``TransferAgent.register_shared``."""
        return self._add(name, memory.adopt_shared(fd), True)

    def _register_on_device(self, buffer: object, name: str, writable: bool) -> Region:
        cuda = load_cuda() if self.cuda is None else self.cuda.cuda
        region = self.regions.add(name, adopt_device(buffer, writable, cuda), writable)
        if self.cuda is None:
            assert region.device is not None
            self.cuda = CudaRegions(cuda, region.device)
            self.regions.staging = self.cuda.staging
            for other in self.regions:
                self.cuda.pin(other)
        return region

    def _add(self, name: str, region_memory: memory.Memory, writable: bool) -> Region:
        region = self.regions.add(name, region_memory, writable)
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
        """What peers are told of a region; of one that is not open, just that."""
        if region_id == LIFELINE_ID and self.ucx is not None:
            return self.ucx.lifeline_info()
        region = self.regions.find(region_id)
        if region is None:
            return RegionInfo(region_id, False, False, False, 0, 0)
        key = b"" if self.ucx is None else self.ucx.key(region_id)
        if region.device is not None and self.cuda is not None:
            ipc = self.cuda.handle(region)
            return RegionInfo(
                region_id, True, region.writable, False, region.nbytes, region.address, b"", True, ipc
            )
        shared = region.fd >= 0
        return RegionInfo(region_id, True, region.writable, shared, region.nbytes, region.address, key)

    def share(self, sock: socket.socket, region_id: int) -> None:
        """Send the descriptor of a memfd over ``sock``, which is then closed; nothing when there is none."""
        with sock:
            region = self.regions.find(region_id)
            fd = self.lifeline.fd if region_id == LIFELINE_ID else -1 if region is None else region.fd
            if fd >= 0 and sock.family == socket.AF_UNIX:
                # A byte to go with it; the socket's buffer is empty, so this cannot block.
                socket.send_fds(sock, [b"\0"], [fd])

    def let_go(self, control: Control, region_id: int) -> None:
        """A peer reads a closed region no more."""
        self._lingering.let_go(control, region_id)

    def gone(self, control: Control) -> None:
        """A connection has ended."""
        self._lingering.gone(control)

    def _forget(self, region_id: int) -> None:
        if self.ucx is not None:
            self.ucx.forget(region_id)
        if self.cuda is not None:
            self.cuda.forget(region_id)

    def _closed(self, region: Region) -> None:
        if self.ucx is not None or region.device is not None:
            self._lingering.add(region, set(self._controls))
        for control in list(self._controls):
            control.region_closed(region.id)
        for link in list(self.local_links):
            link.region_closed(region.id)

    async def withdraw(self) -> None:
        """Close the regions in device memory, and wait until no process has them mapped any more.

        What a peer does not let go of (it may be stopped) is never freed.
        """
        for region in self.regions:
            if region.device is not None:
                region.close()
        kept = await self._lingering.on_devices_gone(_LET_GO_S)
        if kept:
            _log.warning(
                "%d regions in device memory are kept, because peers still have them mapped", len(kept)
            )
            _kept.extend(kept)

    def close(self) -> None:
        """Close all regions. No connection is left, and nothing is under way."""
        self.regions.close()
        if self.ucx is not None:
            self.ucx.close()
        if self.cuda is not None:
            self.cuda.close()
        self.lifeline.close()
