"""Adapters that were read, kept in host memory: one that comes back is not read and checked again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

import torch

from moonpool.engine.adapters.peft import PeftAdapter
from moonpool.engine.checkpoint.config import ModelConfig


class HostAdapters:
    """By content, the least recently used leave first. One in each process of an engine. From any thread."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, capacity_nbytes: int) -> None:
        """dtype: of the arena, so that a load copies bytes."""
        self._config, self._dtype, self._capacity_nbytes = config, dtype, capacity_nbytes
        self._adapters: OrderedDict[str, PeftAdapter] = OrderedDict()  # by digest, last used last
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, path: Path, digest: str) -> PeftAdapter:
        """Return the adapter that ``digest`` names, read from ``path`` where it is not here.

        Raises AdapterRefused: the file cannot be read, or has another content by now.
        """
        with self._lock:
            found = self._adapters.get(digest)
            if found is not None:
                self._adapters.move_to_end(digest)
                return found
        adapter = PeftAdapter.read(path, digest, self._config)
        self.keep(adapter)
        return adapter

    def keep(self, adapter: PeftAdapter) -> None:
        """Keep an adapter that was read; others leave for it. One larger than the capacity is not kept."""
        adapter.to(self._dtype)
        if adapter.nbytes > self._capacity_nbytes:
            return
        with self._lock:
            if adapter.digest in self._adapters:
                return
            self._adapters[adapter.digest] = adapter
            self._nbytes += adapter.nbytes
            while self._nbytes > self._capacity_nbytes:
                _, oldest = self._adapters.popitem(last=False)
                self._nbytes -= oldest.nbytes
