"""Blocks on their way from disk to host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.store.residency import Residency
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.copier import Bandwidth
from moonpool.kvstore.tiers.protocols import Bytes, DiskTier


@dataclass(frozen=True, slots=True)
class UnplacedBlock:
    """A block that was read from disk and for which host memory had no room."""

    bytes: Bytes
    checksum: int


class Promoter:
    """Read each block once, however many requests need it meanwhile."""

    def __init__(
        self, residency: Residency, disk: DiskTier, bandwidth: Bandwidth, clock: Callable[[], float]
    ) -> None:
        self._residency = residency
        self._host = residency.host
        self._disk = disk
        self._bandwidth = bandwidth
        self._clock = clock
        self._promoting: dict[BlockKey, asyncio.Task[dict[BlockKey, UnplacedBlock]]] = {}

    def __len__(self) -> int:
        return len(self._promoting)

    async def promote(
        self, keys: Sequence[BlockKey], *, ahead: bool = False
    ) -> dict[BlockKey, UnplacedBlock]:
        """Read a run of one chain into host memory; ``ahead`` of a use that is certain.

        Returns the blocks for which there was no room. Blocks that could not be read are in neither. After a
        cancellation the read goes on for other requests.
        """
        mine = [key for key in keys if key not in self._promoting and key not in self._host]
        if mine:
            task = asyncio.create_task(self._read(mine, ahead), name="promote")
            self._promoting.update(dict.fromkeys(mine, task))
        tasks = {self._promoting[key] for key in keys if key in self._promoting}
        if tasks:
            await asyncio.wait(tasks)
        unplaced: dict[BlockKey, UnplacedBlock] = {}
        for done in tasks:
            unplaced |= done.result()
        return unplaced

    async def close(self) -> None:
        if tasks := set(self._promoting.values()):
            await asyncio.wait(tasks)

    async def _read(self, keys: list[BlockKey], ahead: bool) -> dict[BlockKey, UnplacedBlock]:
        try:
            return await self._read_into_host([key for key in keys if key in self._disk], ahead)
        finally:
            for key in keys:
                del self._promoting[key]

    async def _read_into_host(self, keys: list[BlockKey], ahead: bool) -> dict[BlockKey, UnplacedBlock]:
        host, disk = self._host, self._disk
        parents = [disk.parent_of(key) for key in keys]
        checksums = [disk.checksum_of(key) for key in keys]
        slots = [
            host.reserve(key, parent, held_elsewhere=True, wanted=ahead)
            for key, parent in zip(keys, parents, strict=True)
        ]
        nbytes = host.layout.block_nbytes
        destinations = [np.empty(nbytes, np.uint8) if slot is None else host.bytes_of(slot) for slot in slots]
        began_s = self._clock()
        filled = [False] * len(keys)
        unplaced: dict[BlockKey, UnplacedBlock] = {}
        try:
            filled = await disk.get(keys, [destination.data for destination in destinations])
        finally:
            for i, slot in enumerate(slots):
                parent = parents[i]
                if slot is None:
                    if filled[i]:
                        unplaced[keys[i]] = UnplacedBlock(destinations[i], checksums[i])
                # Not one that was removed meanwhile.
                elif filled[i] and keys[i] in disk and (parent is None or self._residency.is_held(parent)):
                    host.fill(slot, keys[i], parent, checksums[i])
                    self._residency.announce(keys[i])
                else:
                    host.abandon(slot)
        seconds = self._clock() - began_s
        self._bandwidth.observe(sum(filled) * nbytes, seconds)
        metrics.SECONDS.labels("ssd", "load").observe(seconds)
        metrics.PROMOTED_BLOCKS.inc(sum(filled))
        return unplaced
