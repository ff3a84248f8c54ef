"""The tier on disk against the disk itself, and against other systems' disk stores."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path

from moonpool.bench.harness.child import peer
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.sizes import size_name
from moonpool.bench.harness.turns import Call, compared, turns
from moonpool.bench.store.blocks import Bytes, Settings, Shape
from moonpool.kvstore.tiers.ssd import SsdTier
from moonpool.runtime.reports.report import Row
from moonpool.transfer.memory.allocation import allocate

# The tier has room for two rounds, which fill it. From then on each put replaces earlier blocks, in
# files that exist already.
_ROOM = 2
_LMCACHE = Path(__file__).with_name("peers") / "lmcache_child.py"


class RawDisk:
    """The limit: the same bytes by O_DIRECT alone, of the same size, depth and order.

    One file that has been written before. Buffers are huge pages, which are the fastest.
    """

    def __init__(self, path: Path, shape: Shape, threads: int, source: Sequence[Bytes]) -> None:
        self._shape = shape
        self._threads = threads
        self._blocks = allocate(shape.nbytes, "raw", "anonymous").array.reshape(shape.num_blocks, -1)
        for block, bytes_ in zip(self._blocks, source, strict=True):
            block[:] = bytes_
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, shape.nbytes)
        self.write()

    def close(self) -> None:
        os.close(self._fd)

    def write(self) -> None:
        """All blocks, with a sync after each batch."""
        self._pass(range(self._shape.num_blocks), os.pwritev, sync=True)

    def read(self, order: Sequence[int]) -> None:
        self._pass(order, os.preadv, sync=False)

    def _pass(self, order: Sequence[int], call: Callable[..., int], *, sync: bool) -> None:
        for batch in self._shape.batches():
            todo = iter(list(order[batch]))
            threads = [threading.Thread(target=self._work, args=(todo, call)) for _ in range(self._threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if sync:
                os.fdatasync(self._fd)

    def _work(self, todo: Iterator[int], call: Callable[..., int]) -> None:
        nbytes = self._shape.block_nbytes
        for number in todo:
            moved = call(self._fd, [self._blocks[number]], number * nbytes)
            if moved != nbytes:
                raise OSError(f"{moved} of {nbytes} bytes were moved")


class TierBlocks:
    """The tier, with new names and a new order of reading in each round."""

    def __init__(self, tier: SsdTier, shape: Shape, source: Sequence[Bytes]) -> None:
        self.order: list[int] = []
        self._tier = tier
        self._shape = shape
        self._source = source
        self._into = shape.memory("into")
        self._keys = shape.keys(0)

    def begin_round(self, number: int) -> None:
        self._keys = self._shape.keys(number + _ROOM)
        self.order = random.Random(number).sample(range(self._shape.num_blocks), self._shape.num_blocks)

    async def put(self) -> None:
        for batch in self._shape.batches():
            keys = self._keys[batch]
            assert all(await self._tier.put(keys, self._source[batch], parents=[None] * len(keys)))

    async def get(self) -> None:
        keys = [self._keys[i] for i in self.order]
        for batch in self._shape.batches():
            assert all(await self._tier.get(keys[batch], self._into[batch]))

    def check(self) -> None:
        """The blocks that were read last must be the ones that were written."""
        pairs = zip(self._into, self.order, strict=True)
        assert all((into == self._source[i]).all() for into, i in pairs), "bytes differ"


async def disk_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Cold: past the page cache. Durable: synced, with checksums and index, before ``put`` returns."""
    for block_nbytes in settings.block_sizes:
        shape = Shape.of(block_nbytes, settings.total_nbytes)
        with tempfile.TemporaryDirectory(prefix="bench-store-", dir=settings.directory) as directory:
            seconds = await _measure(run, shape, settings.threads, Path(directory))
        for way, text in (("put", "durable"), ("get", "cold, random")):
            samples = {"moonpool": seconds[way], "raw disk": seconds[f"raw {way}"]}
            if f"lmcache {way}" in seconds:
                samples["lmcache"] = seconds[f"lmcache {way}"]
            case = f"disk {way}, {text}, {size_name(block_nbytes)}, batches of {shape.batch}"
            for row in compared(case, "throughput", "GB/s", samples, shape.gb_per_s):
                yield row


async def _measure(run: Run, shape: Shape, threads: int, directory: Path) -> dict[str, list[float]]:
    source = shape.memory("source")
    async with AsyncExitStack() as stack:
        raw = stack.enter_context(closing(RawDisk(directory / "raw", shape, threads, source)))
        capacity_nbytes = shape.nbytes * _ROOM
        opened = await SsdTier.open(
            directory / "tier", shape.layout, capacity_nbytes=capacity_nbytes, threads=threads
        )
        tier = TierBlocks(await stack.enter_async_context(opened), shape, source)
        contestants: dict[str, Call] = {
            "put": tier.put,
            "get": tier.get,
            "raw put": raw.write,
            "raw get": lambda: raw.read(tier.order),
        }
        if "lmcache" in run.peers:
            lmcache = peer(
                "lmcache",
                _LMCACHE,
                "LmCache",
                directory=str(directory),
                block_nbytes=shape.block_nbytes,
                num_blocks=shape.num_blocks,
                batch=shape.batch,
                threads=threads,
            )
            child = await stack.enter_async_context(lmcache)
            contestants["lmcache put"] = lambda: child.call("put")
            contestants["lmcache get"] = lambda: child.call("get", order=tier.order)
        # A contestant that follows one with unfinished writes pays for them: the start moves on.
        found = await turns(contestants, run.rounds, warm_up=_ROOM, rotate=2, before=tier.begin_round)
        tier.check()
    return found
