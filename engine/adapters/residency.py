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
    users: int = 0  # requests on their way into the engine


Load = Callable[[AdapterRef, int, int, int], Awaitable[None]]


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
        self.load_s = 0.0  # mean seconds of a load; 0: none yet
        self.num_loads = 0
        self._load, self._in_use, self._clock = load, in_use, clock
        self._residents: OrderedDict[str, _Resident] = OrderedDict()  # by digest, last used last
        self._loading: dict[str, tuple[_Resident, asyncio.Task[None]]] = {}
        self._number = -1

    @property
    def digests(self) -> list[str]:
        """Contents that are resident, least recently used first."""
        return list(self._residents)

    @asynccontextmanager
    async def using(self, ref: AdapterRef) -> AsyncGenerator[int]:
        """Wait until the adapter is resident; it stays so inside the ``with``, and while a sequence of the
        engine has the number that this yields.

        Raises AdapterRefused: its files are not those of ``ref``, or need more than all memory for adapters.
        """
        resident = await self._resident(ref)
        resident.users += 1
        try:
            yield resident.number
        finally:
            resident.users -= 1

    async def _resident(self, ref: AdapterRef) -> _Resident:
        while (found := self._residents.get(ref.digest)) is None:
            if ref.digest not in self._loading and not self._begin(ref):
                await asyncio.sleep(_POLL_S)  # all adapters are in use
                continue
            task = self._loading[ref.digest][1]
            await asyncio.wait((task,))
            task.result()
        self._residents.move_to_end(ref.digest)
        return found

    def _begin(self, ref: AdapterRef) -> bool:
        """Begin a load. Return False without room now. It goes on when the request that asked for it ends."""
        if ref.rank > self.num_rows:
            raise AdapterRefused(
                ref.path,
                f"it has rank {ref.rank}; lora.memory_nbytes has room for ranks up to {self.num_rows} of "
                "this model",
            )
        first = self._take_rows(ref.rank)
        if first is None:
            return False
        self._number += 1
        resident = _Resident(self._number, first, ref.rank)
        task = asyncio.create_task(self._run(ref, resident), name=f"load adapter {ref.name}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps no request waits
        self._loading[ref.digest] = resident, task
        return True

    async def _run(self, ref: AdapterRef, resident: _Resident) -> None:
        began_s = self._clock()
        try:
            await self._load(ref, resident.number, resident.first, self.num_rows)
            self._residents[ref.digest] = resident
        finally:
            del self._loading[ref.digest]
        took_s = self._clock() - began_s
        self.load_s = took_s if not self.num_loads else self.load_s + _RECENT * (took_s - self.load_s)
        self.num_loads += 1
        log.info("adapter %s of rank %d loaded in %.3f s", ref.name, ref.rank, took_s)

    def _take_rows(self, count: int) -> int | None:
        """Return the first of ``count`` free rows, after the least recently used adapters have left; None:
        those that are left are in use."""
        while (first := self._gap(count)) is None:
            idle = (
                digest
                for digest, one in self._residents.items()
                if not one.users and not self._in_use(one.number)
            )
            if (digest := next(idle, None)) is None:
                return None
            del self._residents[digest]
        return first

    def _gap(self, count: int) -> int | None:
        """The first free run of ``count`` rows."""
        taken = [*self._residents.values(), *(resident for resident, _ in self._loading.values())]
        end = 0
        for one in sorted(taken, key=lambda one: one.first):
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
