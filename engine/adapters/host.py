"""Adapters that were read, kept in host memory: one that comes back is not read and checked again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from moonpool.engine.adapters.packing import AdapterPacking, PackedAdapter
from moonpool.engine.adapters.peft import PeftAdapter

_MOST_SIZES = 1 << 14


class HostAdapters:
    """By content, the least recently used leave first; packed, so that a load copies bytes. One in each
    process of an engine. From any thread."""

    def __init__(self, packings: Sequence[AdapterPacking], capacity_nbytes: int) -> None:
        """packings: of this process, and of all others of the group where it allocates the blocks."""
        self._packings, self._capacity_nbytes = packings, capacity_nbytes
        self._adapters: OrderedDict[str, PackedAdapter] = OrderedDict()  # by digest, last used last
        self._sizes: OrderedDict[str, int] = OrderedDict()  # in blocks, also of those that have left
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._adapters)

    def num_blocks(self, digest: str) -> int | None:
        """Return how many blocks the adapter takes; None: it was not read yet, or long ago."""
        return self._sizes.get(digest)

    def get(self, path: Path, digest: str) -> PackedAdapter:
        """Return the adapter that ``digest`` names, read from ``path`` where it is not here.

        Raises AdapterRefused: the file cannot be read, or has another content by now.
        """
        with self._lock:
            found = self._adapters.get(digest)
            if found is not None:
                self._adapters.move_to_end(digest)
                return found
        return self.keep(PeftAdapter.read(path, digest, self._packings[0].config))

    def keep(self, adapter: PeftAdapter) -> PackedAdapter:
        """Pack and keep an adapter that was read; others leave for it. One larger than the capacity is not
        kept. Raises AdapterRefused: it does not fit into blocks."""
        num_blocks = max(packing.num_blocks(adapter) for packing in self._packings)
        packed = self._packings[0].pack(adapter, num_blocks)
        with self._lock:
            self._sizes[packed.digest] = num_blocks
            if len(self._sizes) > _MOST_SIZES:
                self._sizes.popitem(last=False)
            if packed.image.nbytes > self._capacity_nbytes or packed.digest in self._adapters:
                return packed
            self._adapters[packed.digest] = packed
            self._nbytes += packed.image.nbytes
            while self._nbytes > self._capacity_nbytes:
                _, oldest = self._adapters.popitem(last=False)
                self._nbytes -= oldest.image.nbytes
        return packed
