"""The regions of an agent as UCX knows them."""

from __future__ import annotations

from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.peer_memory import LIFELINE_ID
from moonpool.transfer.memory.lifeline import LIFELINE_NBYTES, Lifeline
from moonpool.transfer.memory.region import Region
from moonpool.transfer.paths.ucx.rma_path import pack_facts
from moonpool.transfer.paths.ucx.worker import Mapping, UcxWorker


class UcxRegions:
    """Those in host memory. One that is closed stays known until ``forget``."""

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
        """What peers need to read it; empty when it is not mapped."""
        mapping = self._mappings.get(region_id)
        return b"" if mapping is None else mapping.key

    def lifeline_info(self) -> RegionInfo:
        facts = pack_facts(self._mappings[LIFELINE_ID].key, self.worker.address)
        return RegionInfo(LIFELINE_ID, True, False, False, LIFELINE_NBYTES, self._lifeline.address, facts)

    def forget(self, region_id: int) -> None:
        """Nobody reads it any more."""
        mapping = self._mappings.pop(region_id, None)
        if mapping is not None:
            self.worker.unmap(mapping)

    def close(self) -> None:
        """End the worker: from here on nobody reads."""
        self.worker.close()
        for mapping in self._mappings.values():
            self.worker.unmap(mapping)
        self._mappings.clear()
        self.worker.cleanup()
