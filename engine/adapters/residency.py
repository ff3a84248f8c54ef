"""Which adapters have their weights in the KV pool: loaded when needed, idle as blocks without users are."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from moonpool.engine.batching.sequence import Sequence as Request
from moonpool.engine.errors import AdapterRefused
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.protos import node_pb2

log = logging.getLogger(__name__)

# How often a request looks whether other adapters are in use no longer.
_POLL_S = 0.02
# Weight of the latest load in the mean.
_RECENT = 0.2


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """What names an adapter's content. digest, rank: see ``PeftAdapter``."""

    name: str
    digest: str
    path: Path
    rank: int
    loaded_unix_s: float = 0.0  # when an operator loaded it; 0: at the node's start
    peer: node_pb2.KvAddress | None = None  # a node that probably has it in memory


class Loader(Protocol):
    """``AdapterLoader``. ``num_blocks`` and ``load`` raise AdapterRefused or RankLost."""

    async def num_blocks(self, ref: AdapterRef) -> int:
        """Return how many blocks the adapter takes."""
        ...

    async def load(self, ref: AdapterRef, number: int, block_ids: Sequence[int]) -> str:
        """Write the adapter to these blocks on all ranks, and return where it came from. After an error they
        are undefined, and nothing writes to them any more."""
        ...

    def keys(self, ref: AdapterRef) -> list[BlockKey]:
        """Return the keys of the loaded adapter's blocks in the store; none: they stay out of it."""
        ...


Room = Callable[[int, Request], Awaitable[list[int]]]


@dataclass(slots=True, eq=False)
class _Resident:
    number: int
    block_ids: list[int]
    began_s: float
    load: asyncio.Task[None] | None = None  # while it runs
    needed_s: float | None = None  # when a request first had nothing left to do but wait for the load


@dataclass(slots=True)
class AdapterCounts:
    """Since the start. A load's time is hidden while the requests that want it still fetch blocks or wait."""

    hits: int = 0  # requests that found their adapter resident
    misses: int = 0
    loads_from: Counter[str] = field(default_factory=Counter)  # by source
    load_s_from: dict[str, float] = field(default_factory=dict)
    failed_loads: int = 0
    evictions: int = 0
    hidden_load_s: float = 0.0

    @property
    def loads(self) -> int:
        return self.loads_from.total()


class AdapterPin:
    """An adapter that stays in memory for a request. Its load may still run."""

    def __init__(self, resident: _Resident, pool: BlockPool, clock: Callable[[], float]) -> None:
        self._resident, self._pool, self._clock = resident, pool, clock

    async def give(self, sequence: Request) -> None:
        """Wait for the load and give the adapter to the sequence, until the engine has released that. Raises
        AdapterRefused or RankLost; the sequence is unchanged then."""
        resident = self._resident
        if resident.load is not None:
            if resident.needed_s is None:
                resident.needed_s = self._clock()
            await asyncio.wait((load := resident.load,))
            load.result()
        assert not sequence.adapter_blocks, "the sequence has an adapter"
        self._pool.acquire(resident.block_ids)
        sequence.adapter, sequence.adapter_blocks = resident.number, resident.block_ids


class AdapterResidency:
    """The adapters in the blocks of an engine's pool.

    Each has whole blocks, the same on all ranks, and a user of them for each request and sequence that needs
    it. Without users they are idle, in one order of last use with cached KV, and are evicted together. At
    most half of the pool is in use by adapters, so that sequences, which have the other half, always go on.
    Equal contents are resident once, whatever their names. On one event loop.
    """

    def __init__(self, pool: BlockPool, loader: Loader, room: Room, *, clock: Callable[[], float]) -> None:
        """``room(n, request)`` allocates n blocks in the request's turn."""
        self.counts = AdapterCounts()
        self.most_blocks = pool.num_blocks // 2
        """In use at a time."""
        self._pool, self._loader, self._room, self._clock = pool, loader, room, clock
        self._mean_load_s = 0.0  # 0: none yet
        self._residents: OrderedDict[str, _Resident] = OrderedDict()  # by digest, last used last
        self._number = -1
        self._turn = asyncio.Lock()  # of requests whose adapter needs room, in their order
        self._num_expected = 0  # blocks that one of them waits for

    @property
    def digests(self) -> list[str]:
        """Contents that are resident, least recently used first."""
        return [digest for digest, one in self._residents.items() if one.load is None]

    @property
    def num_blocks(self) -> int:
        """Blocks of resident adapters."""
        return sum(len(one.block_ids) for one in self._residents.values())

    @property
    def num_used_blocks(self) -> int:
        """Blocks of adapters that are in use."""
        return sum(len(one.block_ids) for one in self._residents.values() if self._is_used(one))

    @property
    def load_cost_s(self) -> float:
        """Seconds that one more load costs all requests: where memory is full, the adapter that leaves is
        probably loaded again. 0: none was loaded yet."""
        return self._mean_load_s * (2 if self.counts.evictions else 1)

    @asynccontextmanager
    async def pinned(self, ref: AdapterRef, request: Request) -> AsyncGenerator[AdapterPin]:
        """Wait for blocks; the adapter stays in them inside the ``with``. Its load runs beside what is there:
        see ``AdapterPin.give``. ``request``: whose turn it is.

        A request that holds blocks must have a pin already: otherwise those that wait for adapters and those
        that wait for blocks could wait for each other.

        Raises AdapterRefused: its files are not those of ``ref``, or need more blocks than adapters may use.
        """
        resident = await self._acquired(ref, request)
        try:
            yield AdapterPin(resident, self._pool, self._clock)
        finally:
            self._pool.release(resident.block_ids)

    async def _acquired(self, ref: AdapterRef, request: Request) -> _Resident:
        found = self._residents.get(ref.digest)
        if found is not None and found.load is None:
            self.counts.hits += 1
        else:
            self.counts.misses += 1
        found = self._acquire(ref.digest)
        if found is None:
            num_blocks = await self._loader.num_blocks(ref)
            if num_blocks > self.most_blocks:
                raise AdapterRefused(
                    ref.path,
                    f"it takes {num_blocks:,} KV blocks, and adapters may use {self.most_blocks:,} of the "
                    f"{self._pool.num_blocks:,} of the pool: raise engine.pool_nbytes",
                )
            async with self._turn:
                found = await self._with_room(ref, num_blocks, request)
        return found

    def _acquire(self, digest: str, num_expected: int = 0) -> _Resident | None:
        """Use the adapter, if it is resident and may be in use. ``num_expected``: blocks counted for it."""
        found = self._residents.get(digest)
        if found is None:
            return None
        num_used = self.num_used_blocks + self._num_expected - num_expected
        if not self._is_used(found) and num_used + len(found.block_ids) > self.most_blocks:
            return None
        self._pool.acquire(found.block_ids)
        self._residents.move_to_end(digest)
        return found

    async def _with_room(self, ref: AdapterRef, num_blocks: int, request: Request) -> _Resident:
        self._num_expected = num_blocks
        try:
            # Polled: a sequence that has an adapter ends anywhere in the engine.
            while (found := self._acquire(ref.digest, num_blocks)) is None:
                room = self.most_blocks - self.num_used_blocks
                if ref.digest not in self._residents and num_blocks <= room:
                    return self._begin(ref, await self._room(num_blocks, request))
                await asyncio.sleep(_POLL_S)
            return found
        finally:
            self._num_expected = 0

    def _begin(self, ref: AdapterRef, block_ids: list[int]) -> _Resident:
        """Begin a load into allocated blocks. It goes on when the request that asked for it ends."""
        self._number += 1
        resident = self._residents[ref.digest] = _Resident(self._number, block_ids, self._clock())
        self._pool.acquire(block_ids)  # for the load
        resident.load = task = asyncio.create_task(self._run(ref, resident), name=f"load adapter {ref.name}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps no request waits
        return resident

    async def _run(self, ref: AdapterRef, resident: _Resident) -> None:
        counts, pool = self.counts, self._pool
        try:
            await pool.ready()
            source = await self._loader.load(ref, resident.number, resident.block_ids)
        except BaseException:  # a load that is cancelled gives its blocks back, too
            counts.failed_loads += 1
            # Requests that have pinned it get the error; the next one tries again.
            del self._residents[ref.digest]
            pool.release(resident.block_ids)
            raise
        self._seal(resident.block_ids, self._loader.keys(ref))
        pool.keep_together(resident.block_ids, lambda: self._evicted(ref.digest))
        pool.release(resident.block_ids)
        ended_s = self._clock()
        took_s = ended_s - resident.began_s
        resident.load = None
        needed_s = ended_s if resident.needed_s is None else resident.needed_s
        counts.loads_from[source] += 1
        counts.load_s_from[source] = counts.load_s_from.get(source, 0.0) + took_s
        counts.hidden_load_s += needed_s - resident.began_s
        mean_s = self._mean_load_s
        self._mean_load_s = took_s if counts.loads == 1 else mean_s + _RECENT * (took_s - mean_s)
        log.info("adapter %s of rank %d loaded from %s in %.3f s", ref.name, ref.rank, source, took_s)

    def _seal(self, block_ids: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Make the blocks a chain of the store, unless a part of a former load is still being read there."""
        if not any(self._pool.block_of(key) is not None for key in keys):
            for i, key in enumerate(keys):
                self._pool.seal(block_ids[i], key, keys[i - 1] if i else None)

    def _evicted(self, digest: str) -> None:
        del self._residents[digest]
        self.counts.evictions += 1

    def _is_used(self, resident: _Resident) -> bool:
        # The store reads from the first block on, users need all of them.
        return self._pool.num_users(resident.block_ids[-1]) > 0

    def check_integrity(self) -> None:
        """Blocks belong to one adapter each, and not too many of them are in use. Call it while the store
        reads none of them."""
        blocks = [block for one in self._residents.values() for block in one.block_ids]
        assert len(set(blocks)) == len(blocks), "a block of two adapters"
        assert self.num_used_blocks <= self.most_blocks, "adapters use too many blocks"
