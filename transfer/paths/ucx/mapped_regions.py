"""The regions of an agent that UCX has mapped, and what peers need to read them."""

from __future__ import annotations

import struct

from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.peer_memory import LIFELINE_ID
from moonpool.transfer.memory.lifeline import LIFELINE_NBYTES, Lifeline
from moonpool.transfer.memory.region import Region
from moonpool.transfer.paths.ucx.worker import Mapping, UcxWorker

_LENGTH = struct.Struct("<H")


def unpack_worker_address(packed: bytes) -> tuple[bytes, bytes]:
    """(key of the lifeline, address of the worker) from the ``RegionInfo`` of the lifeline.

    Raises ValueError.
    """
    if len(packed) <= _LENGTH.size:
        raise ValueError("the peer has no UCX")
    (nbytes,) = _LENGTH.unpack_from(packed)
    return packed[_LENGTH.size : _LENGTH.size + nbytes], packed[_LENGTH.size + nbytes :]


class UcxRegions:
    """Regions in host memory. A closed region stays mapped until ``forget``."""

    def __init__(self, worker: UcxWorker, lifeline: Lifeline) -> None:
        self.worker = worker
        self._lifeline = lifeline
        self._mappings: dict[int, Mapping] = {LIFELINE_ID: worker.map(lifeline.address, LIFELINE_NBYTES)}

    def __len__(self) -> int:
        return len(self._mappings) - 1

    def add(self, region: Region) -> None:
        """Raises UcxError."""
        self._mappings[region.id] = self.worker.map(region.address, region.nbytes)

    def key(self, region_id: int) -> bytes:
        """The key peers need to read the region; empty when it is not mapped."""
        mapping = self._mappings.get(region_id)
        return b"" if mapping is None else mapping.key

    def lifeline_info(self) -> RegionInfo:
        """The lifeline as a region, with the address of the worker behind its key."""
        key = self._mappings[LIFELINE_ID].key
        packed = _LENGTH.pack(len(key)) + key + self.worker.address
        return RegionInfo(LIFELINE_ID, True, False, False, LIFELINE_NBYTES, self._lifeline.address, packed)

    def forget(self, region_id: int) -> None:
        """No peer reads the region any more."""
        mapping = self._mappings.pop(region_id, None)
        if mapping is not None:
            self.worker.unmap(mapping)

    def close(self) -> None:
        """End the worker, and unmap all regions."""
        self.worker.close()
        for mapping in self._mappings.values():
            self.worker.unmap(mapping)
        self._mappings.clear()
        self.worker.cleanup()
