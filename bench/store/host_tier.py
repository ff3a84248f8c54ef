"""The host tier against memcpy, and the time of a block beside its copy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import numpy as np

from moonpool.bench.harness.child import Child, peer
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.sizes import KIB, size_name
from moonpool.bench.harness.turns import Call, compared, turns
from moonpool.bench.store.blocks import Bytes, Settings, Shape
from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.tiers.host import HostTier
from moonpool.runtime.config.options import StoreOptions
from moonpool.runtime.reports.report import Row
from moonpool.transfer.memory.allocation import allocate

# So small that the copy takes no time beside the rest.
_SMALL_NBYTES = 4 * KIB
MOONCAKE = Path(__file__).with_name("peers") / "mooncake_child.py"


class HostBlocks:
    """A host tier alone (no checksums on the way), and a store over one (every block verified)."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._source, self._into = shape.memory("source"), shape.memory("into")
        self._plain = HostTier(self._arena("plain"), shape.layout)
        self._store = TieredStore(shape.layout, StoreOptions(), self._arena("store"))
        self._keys = shape.keys(0)
        self.close = self._store.close

    def _arena(self, name: str) -> Bytes:
        return allocate(self._shape.nbytes, name, "memfd").array

    def begin_round(self, number: int) -> None:
        """New names: from the second round on everything is put into a full tier."""
        self._keys = self._shape.keys(number + 1)

    def contestants(self) -> dict[str, Call]:
        return {
            "memcpy": self._memcpy,
            "put": self._put,
            "get": self._get,
            "verified put": self._verified_put,
            "verified get": self._verified_get,
        }

    def _memcpy(self) -> None:
        for into, source in zip(self._into, self._source, strict=True):
            np.copyto(into, source)

    def _put(self) -> None:
        tier = self._plain
        for key, source in zip(self._keys, self._source, strict=True):
            slot = tier.reserve(key, None)
            assert slot is not None
            np.copyto(tier.bytes_of(slot), source)
            tier.fill(slot, key, None, 0)

    def _get(self) -> None:
        tier = self._plain
        for key, into in zip(self._keys, self._into, strict=True):
            slot = tier.slot_of(key)
            assert slot is not None
            np.copyto(into, tier.bytes_of(slot))

    async def _verified_put(self) -> None:
        for batch in self._shape.batches():
            assert await self._store.put(self._keys[batch], self._source[batch]) == len(self._keys[batch])

    async def _verified_get(self) -> None:
        for batch in self._shape.batches():
            await self._store.get(self._keys[batch], self._into[batch])


async def host_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """GB/s of blocks put and got, beside memcpy of the same blocks between the same memory."""
    for block_nbytes in settings.block_sizes:
        shape = Shape.of(block_nbytes, settings.total_nbytes)
        if "mooncake" in run.peers:
            async with peer("mooncake", MOONCAKE, "Mooncake", lent_nbytes=2 * shape.nbytes) as child:
                await child.call("prepare", count=shape.num_blocks, nbytes=block_nbytes, batch=shape.batch)
                seconds = await _measure(shape, run.rounds, child)
        else:
            seconds = await _measure(shape, run.rounds)
        for way in ("put", "get", "verified put", "verified get"):
            samples = {"moonpool": seconds[way], "memcpy": seconds["memcpy"]}
            if f"mooncake {way}" in seconds:
                samples["mooncake"] = seconds[f"mooncake {way}"]
            case = f"host {way}, {size_name(block_nbytes)}"
            for row in compared(case, "throughput", "GB/s", samples, shape.gb_per_s):
                yield row
    small = Shape(_SMALL_NBYTES, 4096 if run.quick else 16384, 64)
    seconds = await _measure(small, run.rounds)
    for way in ("verified put", "verified get"):
        beside_s = (median(seconds[way]) - median(seconds["memcpy"])) / small.num_blocks
        case = f"host {way}, {size_name(_SMALL_NBYTES)}, batches of {small.batch}"
        yield Row(case, "time a block beside memcpy", 1e6 * beside_s, "µs")


async def _measure(shape: Shape, rounds: int, mooncake: Child | None = None) -> dict[str, list[float]]:
    host = HostBlocks(shape)
    contestants = host.contestants()
    if mooncake is not None:
        contestants["mooncake put"] = lambda: mooncake.call("put")
        contestants["mooncake get"] = lambda: mooncake.call("get", order=list(range(shape.num_blocks)))
    try:
        return await turns(contestants, rounds, before=host.begin_round)
    finally:
        await host.close()
