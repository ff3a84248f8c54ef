"""Pages of an engine's host memory put on a store node and got from it, as SGLang's HiCache does it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import count

import numpy as np
import torch

from moonpool.bench.harness.child import Child, peer
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import daemon, redis
from moonpool.bench.harness.sizes import KIB, MIB, size_name
from moonpool.bench.harness.turns import Call, compared, repeat, spread, turns
from moonpool.bench.store.blocks import Settings
from moonpool.bench.store.host_tier import MOONCAKE
from moonpool.connectors.sglang.host_pages import HostPages
from moonpool.connectors.sglang.page_pool import PagePool
from moonpool.connectors.sglang.settings import read_settings
from moonpool.connectors.sglang.store_thread import StoreThread
from moonpool.runtime.reports.report import Row

_CAPACITY_NBYTES = 1024 * MIB
_SIZES = (64 * KIB, 256 * KIB, MIB, 2 * MIB)
# Pages of one call of SGLang, and most bytes of one here.
_MOST_PAGES, _MOST_NBYTES = 128, 64 * MIB
_TURN_S = 0.15

Move = Callable[[], Awaitable[float]]  # moves all pages once; returns seconds


class _HostPool:
    """One run of memory a page, one token: as the latent KV of MLA with pages first."""

    layout = "page_first"
    page_size = 1

    def __init__(self, num_pages: int, nbytes: int) -> None:
        self.kv_buffer = torch.randint(0, 256, (num_pages, nbytes), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        base, nbytes = self.kv_buffer.data_ptr(), self.kv_buffer.shape[1]
        return [base + int(each) * nbytes for each in indices], [nbytes] * len(indices)


class _Pages:
    """The pages of one size; ``stored`` ones are written and ``loaded`` ones are read into."""

    def __init__(self, nbytes: int, store: StoreThread) -> None:
        self.nbytes = nbytes
        self.num_pages = min(_MOST_PAGES, _MOST_NBYTES // nbytes)
        self._store = store
        self._pools = [_HostPool(self.num_pages, nbytes) for _ in range(2)]
        self._prefix = f"bench-{nbytes}"
        self._stored, self._loaded = (PagePool(HostPages(each), self._prefix, store) for each in self._pools)
        self._indices = torch.arange(self.num_pages)
        self._generations = count()
        self._keys: list[str] = []

    def put(self) -> float:
        """Remove the pages, then put all under new names. Returns the seconds of putting."""
        self.remove()
        generation = next(self._generations)
        self._keys = [f"{generation}-{page}" for page in range(self.num_pages)]
        began_s = time.perf_counter()
        assert self._stored.put(self._keys, self._indices) == self.num_pages
        return time.perf_counter() - began_s

    def get(self) -> float:
        began_s = time.perf_counter()
        found = self._loaded.get(self._keys, self._indices)
        seconds = time.perf_counter() - began_s
        assert all(found)
        assert torch.equal(self._pools[0].kv_buffer, self._pools[1].kv_buffer)
        return seconds

    def exists(self) -> float:
        began_s = time.perf_counter()
        found = self._stored.exists(self._keys)
        seconds = time.perf_counter() - began_s
        assert all(found)
        return seconds

    def memcpy(self) -> float:
        source, into = (pool.kv_buffer.numpy() for pool in self._pools)
        began_s = time.perf_counter()
        for page, place in zip(source, into, strict=True):
            np.copyto(place, page)
        return time.perf_counter() - began_s

    def remove(self) -> None:
        names = [f"{self._prefix}/{key}/0" for key in self._keys]
        self._store.call(lambda client: client.batch_remove(names))


async def page_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Bandwidth of pages beside memcpy's and Mooncake Store's, and how long a search for them takes."""
    async with AsyncExitStack() as stack:
        mooncake = None
        if "mooncake" in run.peers:
            node = peer("mooncake", MOONCAKE, "Mooncake", paused=False, lent_nbytes=_CAPACITY_NBYTES)
            port = (await stack.enter_async_context(node)).ready
            client = peer("mooncake", MOONCAKE, "Mooncake", paused=False, lent_nbytes=0, master_port=port)
            mooncake = await stack.enter_async_context(client)
        url = await stack.enter_async_context(redis())
        sets = [
            f"index.redis_url={url}",
            "store.host.capacity_nbytes=1MiB",
            f"store_node.object_nbytes={_CAPACITY_NBYTES}",
        ]
        await stack.enter_async_context(daemon("moonpool.kvstore.store_node", sets))
        store = StoreThread(read_settings({"url": url}))
        stack.push_async_callback(asyncio.to_thread, store.close)
        for nbytes in _SIZES[:1] if run.quick else _SIZES:
            pages = await asyncio.to_thread(_Pages, nbytes, store)
            run.say(f"pages of {size_name(nbytes)}")
            for row in await _size_rows(pages, run.rounds, mooncake):
                yield row
            await asyncio.to_thread(pages.remove)


def _gbps(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9


async def _size_rows(pages: _Pages, rounds: int, mooncake: Child | None) -> list[Row]:
    order = list(range(pages.num_pages))
    if mooncake is not None:
        await mooncake.call("prepare", count=pages.num_pages, nbytes=pages.nbytes, batch=pages.num_pages)
        await mooncake.call("put")
    await asyncio.to_thread(pages.put)
    rows: list[Row] = []
    for way in ("get", "put"):
        ours: Callable[[], float] = getattr(pages, way)
        moves: dict[str, Move] = {
            "moonpool": lambda move=ours: asyncio.to_thread(move),  # type: ignore[misc]
            "memcpy": lambda: asyncio.to_thread(pages.memcpy),
        }
        if mooncake is not None:

            async def theirs(way: str = way) -> float:
                return float(await mooncake.call(way, **({"order": order} if way == "get" else {})))

            moves["mooncake store"] = theirs
        contestants: dict[str, Call] = {
            name: lambda move=move: repeat(move, _TURN_S)  # type: ignore[misc]
            for name, move in moves.items()
        }
        seconds = await turns(contestants, rounds, warm_up=0)
        nbytes = pages.num_pages * pages.nbytes
        case = f"pages/{way}/{pages.num_pages} × {size_name(pages.nbytes)}"
        rows += compared(case, "bandwidth", "GB/s", seconds, partial(_gbps, nbytes))
    searches = [await asyncio.to_thread(pages.exists) for _ in range(10 * rounds)]
    return [*rows, spread(f"pages/exists/{pages.num_pages}", "latency", searches, "ms", 1e3)]
