"""Loads an adapter on all ranks of an engine, beside its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from moonpool.engine.adapters.arena import AdapterArena
from moonpool.engine.adapters.host import HostAdapters
from moonpool.engine.adapters.residency import AdapterRef
from moonpool.engine.ranks.process_handle import RankProcess


class AdapterLoader:
    """``loader(ref, number, first, num_rows)``: see ``AdapterResidency``."""

    def __init__(
        self,
        arena: AdapterArena,
        host: HostAdapters,
        ranks: Sequence[RankProcess],
        reader: ThreadPoolExecutor,
    ) -> None:
        """arena, host: rank 0's; ranks: the others; reader: the thread that reads files here."""
        self._arena, self._host, self._ranks, self._reader = arena, host, ranks, reader

    async def __call__(self, ref: AdapterRef, number: int, first: int, num_rows: int) -> None:
        """Return when every rank has the adapter, or when all have ended their try. Raises AdapterRefused or
        RankLost; the rows are undefined then."""

        def load() -> None:
            adapter = self._host.get(ref.path, ref.digest)
            assert adapter.rank == ref.rank, "the digest names another rank"
            self._arena.load(adapter, number, first, num_rows)

        own = asyncio.get_running_loop().run_in_executor(self._reader, load)
        others = (rank.load_adapter(ref.path, ref.digest, number, first, num_rows) for rank in self._ranks)
        for result in await asyncio.gather(own, *others, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
