"""The host tier against memcpy, and what a block costs beside its copy."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from moonpool.bench.store.block_set import Bytes, Shape, TierSettings
from moonpool.bench.store.peers.peer_store import PeerStore
from moonpool.bench.transfer.batch_shape import size_name
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.tiers.host import HostTier
from moonpool.runtime.config.options import StoreOptions
from moonpool.runtime.reports.report import Row, versus
from moonpool.transfer.memory.allocation import allocate

PLAIN_OF_MEMCPY, VERIFIED_OF_MEMCPY, OVERHEAD_US = 0.9, 0.6, 20.0
# So small that the copy is nothing beside what a block costs otherwise.
SMALL_NBYTES = 4096


class Host:
    """A host tier alone (no checksums on the way), and a store over one (every block verified)."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.source, self.into = shape.memory("source"), shape.memory("into")
        self._plain = HostTier(self._arena("plain"), shape.layout)
        self._store = TieredStore(shape.layout, StoreOptions(), self._arena("store"))

    def _arena(self, name: str) -> Bytes:
        return allocate(self.shape.nbytes, name, "memfd").array

    async def close(self) -> None:
        await self._store.close()

    async def round(self, generation: int) -> dict[str, float]:
        """Seconds for all blocks, each way. Everything is put into a full tier."""
        keys = self.shape.keys(generation)
        took = {"memcpy": self._memcpy(), "put": self._put(keys), "get": self._get(keys)}
        took["verified put"] = await self._verified_put(keys)
        took["verified get"] = await self._verified_get(keys)
        return took

    def _memcpy(self) -> float:
        started = time.perf_counter()
        for into, source in zip(self.into, self.source, strict=True):
            np.copyto(into, source)
        return time.perf_counter() - started

    def _put(self, keys: Sequence[BlockKey]) -> float:
        put = self._plain.put
        started = time.perf_counter()
        for key, source in zip(keys, self.source, strict=True):
            put(key, source, checksum=0)
        return time.perf_counter() - started

    def _get(self, keys: Sequence[BlockKey]) -> float:
        tier = self._plain
        started = time.perf_counter()
        for key, into in zip(keys, self.into, strict=True):
            slot = tier.slot_of(key)
            assert slot is not None
            np.copyto(into, tier.bytes_of(slot))
        return time.perf_counter() - started

    async def _verified_put(self, keys: Sequence[BlockKey]) -> float:
        started = time.perf_counter()
        for batch in self.shape.batches():
            assert await self._store.put(keys[batch], self.source[batch]) == len(keys[batch])
        return time.perf_counter() - started

    async def _verified_get(self, keys: Sequence[BlockKey]) -> float:
        started = time.perf_counter()
        for batch in self.shape.batches():
            await self._store.get(keys[batch], self.into[batch])
        return time.perf_counter() - started


async def _measure(shape: Shape, rounds: int, peers: Sequence[PeerStore]) -> dict[str, float]:
    """Median seconds of all rounds but the first."""
    host = Host(shape)
    seconds: dict[str, list[float]] = defaultdict(list)
    for generation in range(rounds + 1):
        took = await host.round(generation)
        for peer in peers:
            took[f"{peer.name} put"], took[f"{peer.name} get"] = await peer.round(range(shape.num_blocks))
        for name, value in took.items() if generation else ():
            seconds[name].append(value)
    await host.close()
    return {name: median(values) for name, values in seconds.items()}


async def host_rows(shape: Shape, settings: TierSettings, peers: Sequence[PeerStore]) -> list[Row]:
    """GB/s of blocks put and got, of which memcpy's, moving the same blocks between the same memory."""
    seconds = await _measure(shape, settings.rounds, peers)
    rows = []
    for what in ("put", "get", "verified put", "verified get"):
        goal = VERIFIED_OF_MEMCPY if what.startswith("verified") else PLAIN_OF_MEMCPY
        case = f"host {what}, {size_name(shape.block_nbytes)}"
        row = Row(case, "throughput", shape.nbytes / seconds[what] / 1e9, "GB/s")
        of_memcpy = versus(row, "memcpy", shape.nbytes / seconds["memcpy"] / 1e9)
        if shape.block_nbytes == 1 << 20:
            of_memcpy = replace(of_memcpy, limit="at least", limit_value=goal)
        rows.append(of_memcpy)
        for peer in peers if not what.startswith("verified") else ():
            rows.append(versus(row, peer.name, shape.nbytes / seconds[f"{peer.name} {what}"] / 1e9))
    return rows


async def overhead_rows(settings: TierSettings) -> list[Row]:
    """Microseconds a block beside its copy, in batches of 64, by blocks so small that nothing else counts."""
    shape = Shape(SMALL_NBYTES, 16384, 64)
    seconds = await _measure(shape, settings.rounds, ())
    rows = []
    for what in ("verified put", "verified get"):
        beside_us = (seconds[what] - seconds["memcpy"]) / shape.num_blocks * 1e6
        case = f"host {what}, {size_name(SMALL_NBYTES)}, batches of 64"
        row = Row(case, "time a block beside memcpy", beside_us, "µs")
        rows.append(replace(row, limit="at most", limit_value=OVERHEAD_US))
    return rows
