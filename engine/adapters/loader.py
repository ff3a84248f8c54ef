"""Loads an adapter on all ranks of an engine, beside its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from moonpool.engine.adapters.host import HostAdapters
from moonpool.engine.adapters.packing import PackedAdapter
from moonpool.engine.adapters.pages import AdapterPages
from moonpool.engine.adapters.residency import AdapterRef
from moonpool.engine.ranks.process_handle import RankProcess


class AdapterLoader:
    """See ``residency.Loader``."""

    def __init__(
        self,
        pages: AdapterPages,
        host: HostAdapters,
        ranks: Sequence[RankProcess],
        reader: ThreadPoolExecutor,
    ) -> None:
        """pages, host: rank 0's; ranks: the others; reader: the thread that reads files here."""
        self._pages, self._host, self._ranks, self._reader = pages, host, ranks, reader

    async def num_blocks(self, ref: AdapterRef) -> int:
        """See ``residency.Loader``."""
        known = self._host.num_blocks(ref.digest)
        if known is not None:
            return known
        read = asyncio.get_running_loop().run_in_executor(self._reader, self._get, ref)
        return (await read).num_blocks

    async def load(self, ref: AdapterRef, number: int, block_ids: Sequence[int]) -> None:
        """See ``residency.Loader``. Returns when every rank has the adapter, or raises when all have ended
        their try."""

        def load() -> None:
            self._pages.load(self._get(ref), number, block_ids)

        own = asyncio.get_running_loop().run_in_executor(self._reader, load)
        others = (rank.load_adapter(ref.path, ref.digest, number, block_ids) for rank in self._ranks)
        for result in await asyncio.gather(own, *others, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _get(self, ref: AdapterRef) -> PackedAdapter:
        adapter = self._host.get(ref.path, ref.digest)
        assert adapter.rank == ref.rank, "the digest names another rank"
        return adapter
