"""Pages of one host pool, moved to the store and back."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from moonpool.connectors.sglang.host_pages import HostPages, copy_in, copy_out
from moonpool.connectors.sglang.page_objects import PageObjects
from moonpool.connectors.sglang.store_thread import StoreThread
from moonpool.kvstore.tiers.protocols import Bytes

# A page of no more runs than this is one object a run, which are moved without a copy. A page of more is
# gathered into one object: each costs a record and a part of a message.
_MOST_RUNS = 4
# Memory in which pages are gathered, in each direction.
_STAGING_NBYTES = 64 << 20


class PagePool:
    """Threads may share it. Its methods raise what ``StoreThread.call`` does, and ``ValueError``."""

    def __init__(self, pages: HostPages, prefix: str, store: StoreThread) -> None:
        """Registers the pool's memory, or where pages are gathered. ``prefix``: as ``PageObjects``."""
        self._pages = pages
        self.is_zero_copy = len(pages.run_nbytes) <= _MOST_RUNS
        self._objects = PageObjects(prefix, len(pages.run_nbytes) if self.is_zero_copy else 1, store)
        self._staging: dict[str, _Staging] = {}
        if self.is_zero_copy:
            for memory in pages.memory:
                store.register(memory)
        else:
            self._staging = {way: _Staging(pages.page_nbytes, store) for way in ("get", "put")}

    @property
    def page_nbytes(self) -> int:
        return self._pages.page_nbytes

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each page can be read now."""
        return self._objects.exists(keys)

    def get(self, keys: Sequence[str], host_indices: Tensor) -> list[bool]:
        """Read each page into the pool. False: there is none, and its memory there is undefined."""
        pages = self._pages.runs(host_indices, len(keys))
        if self.is_zero_copy:
            return self._objects.get(keys, pages)
        staging, found = self._staging["get"], list[bool]()
        with staging.lock:
            for first in range(0, len(keys), staging.num_pages):
                some = pages[first : first + staging.num_pages]
                places = staging.pages(len(some))
                here = self._objects.get(keys[first : first + len(some)], [[place] for place in places])
                for place, runs, is_here in zip(places, some, here, strict=True):
                    if is_here:
                        copy_in(place, runs)
                found += here
        return found

    def put(self, keys: Sequence[str], host_indices: Tensor) -> int:
        """Store the pages that are missing; returns how many. After an error some of them are stored."""
        missing = [at for at, is_here in enumerate(self.exists(keys)) if not is_here]
        pages = self._pages.runs(host_indices, len(keys)) if missing else []
        keys, pages = [keys[at] for at in missing], [pages[at] for at in missing]
        if self.is_zero_copy and missing:
            self._objects.put(keys, pages)
        elif missing:
            self._gather(keys, pages)
        return len(missing)

    def _gather(self, keys: Sequence[str], pages: Sequence[Sequence[Bytes]]) -> None:
        staging = self._staging["put"]
        with staging.lock:
            for first in range(0, len(keys), staging.num_pages):
                some = pages[first : first + staging.num_pages]
                places = staging.pages(len(some))
                for runs, place in zip(some, places, strict=True):
                    copy_out(runs, place)
                self._objects.put(keys[first : first + len(some)], [[place] for place in places])


class _Staging:
    """Memory for whole pages one behind the other. ``lock`` it while pages of it are in use."""

    def __init__(self, page_nbytes: int, store: StoreThread) -> None:
        self.lock = threading.Lock()
        self.num_pages = max(1, _STAGING_NBYTES // page_nbytes)
        self._memory = np.empty((self.num_pages, page_nbytes), np.uint8)
        store.register(self._memory.reshape(-1))

    def pages(self, count: int) -> list[Bytes]:
        return list(self._memory[:count])
