"""Which adapters have their weights in memory: loaded when needed, kept by last use."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from moonpool.engine.errors import AdapterRefused

log = logging.getLogger(__name__)

# How often a request looks whether other adapters can leave now.
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


@dataclass(slots=True)
class _Resident:
    number: int
    first: int
    rank: int
    began_s: float
    load: asyncio.Task[None] | None = None  # while it runs
    users: int = 0  # requests on their way into the engine
    needed_s: float | None = None  # when a request first had nothing left to do but wait for the load


Load = Callable[[AdapterRef, int, int, int], Awaitable[None]]


@dataclass(slots=True)
class AdapterCounts:
    """Since the start. A load's time is hidden while the requests that want it still fetch blocks or wait."""

    hits: int = 0  # requests that found their adapter resident
    misses: int = 0
    loads: int = 0
    failed_loads: int = 0
    evictions: int = 0
    load_s: float = 0.0
    hidden_load_s: float = 0.0


class AdapterPin:
    """An adapter that stays in memory for a request. Its load may still run."""

    def __init__(self, resident: _Resident, clock: Callable[[], float]) -> None:
        self._resident, self._clock = resident, clock

    async def number(self) -> int:
        """Wait for the load; return the adapter's number. Raises AdapterRefused or RankLost."""
        resident = self._resident
        if resident.load is not None:
            if resident.needed_s is None:
                resident.needed_s = self._clock()
            await asyncio.wait((load := resident.load,))
            load.result()
        return resident.number


class AdapterResidency:
    """The adapters in the rows of all ranks' arenas: an adapter of rank r has r consecutive rows.

    The least recently used one without requests leaves when another needs its rows. Equal contents are
    resident once, whatever their names. On one event loop.
    """

    def __init__(
        self, num_rows: int, load: Load, in_use: Callable[[int], bool], *, clock: Callable[[], float]
    ) -> None:
        """``load(ref, number, first, num_rows)`` writes an adapter to all ranks, or raises. ``in_use``:
        whether a sequence of the engine has the adapter of this number."""
        self.num_rows = num_rows
        self.counts = AdapterCounts()
        self._mean_load_s = 0.0  # 0: none yet
        self._load, self._in_use, self._clock = load, in_use, clock
        self._residents: OrderedDict[str, _Resident] = OrderedDict()  # by digest, last used last
        self._number = -1

    @property
    def digests(self) -> list[str]:
        """Contents that are resident, least recently used first."""
        return [digest for digest, one in self._residents.items() if one.load is None]

    @property
    def num_used_rows(self) -> int:
        return sum(one.rank for one in self._residents.values())

    @property
    def load_cost_s(self) -> float:
        """Seconds that one more load costs all requests: where memory is full, the adapter that leaves is
        probably loaded again. 0: none was loaded yet."""
        return self._mean_load_s * (2 if self.counts.evictions else 1)

    @asynccontextmanager
    async def using(self, ref: AdapterRef) -> AsyncGenerator[int]:
        """Wait until the adapter is resident; it stays so inside the ``with``, and while a sequence of the
        engine has the number that this yields.

        Raises AdapterRefused: its files are not those of ``ref``, or need more than all memory for adapters.
        """
        async with self.pinned(ref) as pin:
            yield await pin.number()

    @asynccontextmanager
    async def pinned(self, ref: AdapterRef) -> AsyncGenerator[AdapterPin]:
        """As ``using``, with the load still to be awaited: it runs beside what is in the ``with``.

        A request that holds blocks must have a pin already: otherwise those that wait for rows and those that
        wait for blocks could wait for each other.
        """
        resident = await self._resident(ref)
        resident.users += 1
        try:
            yield AdapterPin(resident, self._clock)
        finally:
            resident.users -= 1

    async def _resident(self, ref: AdapterRef) -> _Resident:
        found = self._residents.get(ref.digest)
        if found is not None and found.load is None:
            self.counts.hits += 1
        else:
            self.counts.misses += 1
        # Polled: room comes when a sequence ends, anywhere in the engine.
        while (found := self._residents.get(ref.digest) or self._begin(ref)) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)  # all adapters are in use
        self._residents.move_to_end(ref.digest)
        return found

    def _begin(self, ref: AdapterRef) -> _Resident | None:
        """Begin a load; None: there is no room now. It goes on when the request that asked for it ends."""
        if ref.rank > self.num_rows:
            raise AdapterRefused(
                ref.path,
                f"it has rank {ref.rank}; lora.memory_nbytes has room for ranks up to {self.num_rows} of "
                "this model",
            )
        first = self._take_rows(ref.rank)
        if first is None:
            return None
        self._number += 1
        resident = _Resident(self._number, first, ref.rank, self._clock())
        resident.load = task = asyncio.create_task(self._run(ref, resident), name=f"load adapter {ref.name}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps no request waits
        self._residents[ref.digest] = resident
        return resident

    async def _run(self, ref: AdapterRef, resident: _Resident) -> None:
        counts = self.counts
        try:
            await self._load(ref, resident.number, resident.first, self.num_rows)
        except BaseException:
            counts.failed_loads += 1
            # Requests that have pinned it get the error; the next one tries again.
            del self._residents[ref.digest]
            raise
        ended_s = self._clock()
        took_s = ended_s - resident.began_s
        resident.load = None
        needed_s = ended_s if resident.needed_s is None else resident.needed_s
        counts.loads += 1
        counts.load_s += took_s
        counts.hidden_load_s += needed_s - resident.began_s
        mean_s = self._mean_load_s
        self._mean_load_s = took_s if counts.loads == 1 else mean_s + _RECENT * (took_s - mean_s)
        log.info("adapter %s of rank %d loaded in %.3f s", ref.name, ref.rank, took_s)

    def _take_rows(self, count: int) -> int | None:
        """Return the first of ``count`` free rows, after the least recently used adapters have left; None:
        those that are left are in use."""
        while (first := self._gap(count)) is None:
            idle = (
                digest
                for digest, one in self._residents.items()
                if one.load is None and not one.users and not self._in_use(one.number)
            )
            if (digest := next(idle, None)) is None:
                return None
            del self._residents[digest]
            self.counts.evictions += 1
        return first

    def _gap(self, count: int) -> int | None:
        """The first free run of ``count`` rows."""
        end = 0
        for one in sorted(self._residents.values(), key=lambda one: one.first):
            if one.first - end >= count:
                return end
            end = one.first + one.rank
        return end if self.num_rows - end >= count else None

    def check_integrity(self) -> None:
        """Rows belong to one adapter each, and no request holds one that is not resident."""
        end = 0
        for one in sorted(self._residents.values(), key=lambda one: one.first):
            assert end <= one.first and one.first + one.rank <= self.num_rows, "rows of two adapters"
            end = one.first + one.rank
