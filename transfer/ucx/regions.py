"""The regions of an agent as UCX knows them, and those that must stay mapped although they are closed."""

from __future__ import annotations

from transfer.control import Control
from transfer.lifeline import LIFELINE_NBYTES, Lifeline
from transfer.peer_memory import LIFELINE_ID
from transfer.region import Region
from transfer.ucx.path import pack_facts
from transfer.ucx.worker import Mapping, UcxWorker
from transfer.wire import RegionInfo


class UcxRegions:
    """Over TCP and shared memory UCX answers a read by copying from the address it was given, whatever lies
    there by then.

    So a closed region keeps its memory until every peer has said that it reads it no more, or is gone.
    """

    def __init__(self, worker: UcxWorker, lifeline: Lifeline) -> None:
        self.worker = worker
        self._lifeline = lifeline
        self._mappings: dict[int, Mapping] = {LIFELINE_ID: worker.map(lifeline.address, LIFELINE_NBYTES)}
        self._lingering: dict[int, tuple[Region, set[Control]]] = {}

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

    def closed(self, region: Region, peers: set[Control]) -> None:
        """``peers``: who was just told, and will answer."""
        self._lingering[region.id] = (region, peers)
        self._free_unread()

    def let_go(self, peer: Control, region_id: int) -> None:
        if region_id in self._lingering:
            self._lingering[region_id][1].discard(peer)
            self._free_unread()

    def gone(self, peer: Control) -> None:
        """Its connection has ended."""
        for _, peers in self._lingering.values():
            peers.discard(peer)
        self._free_unread()

    def _free_unread(self) -> None:
        for region_id in [region_id for region_id, (_, peers) in self._lingering.items() if not peers]:
            del self._lingering[region_id]
            mapping = self._mappings.pop(region_id, None)
            if mapping is not None:
                self.worker.unmap(mapping)

    def close(self) -> None:
        """End the worker: from here on nobody reads."""
        self.worker.close()
        for mapping in self._mappings.values():
            self.worker.unmap(mapping)
        self._mappings.clear()
        self._lingering.clear()
        self.worker.cleanup()
