"""LMCache's local disk backend with O_DIRECT: a file a block; neither synced nor checksummed."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import torch
from lmcache.utils import CacheEngineKey  # type: ignore[import-not-found,unused-ignore]
from lmcache.v1.config import LMCacheEngineConfig  # type: ignore[import-not-found,unused-ignore]
from lmcache.v1.memory_allocators.mixed_memory_allocator import (  # type: ignore[import-not-found,unused-ignore]
    MixedMemoryAllocator,
)
from lmcache.v1.memory_management import MemoryFormat  # type: ignore[import-not-found,unused-ignore]
from lmcache.v1.storage_backend.local_cpu_backend import (  # type: ignore[import-not-found,unused-ignore]
    LocalCPUBackend,
)
from lmcache.v1.storage_backend.local_disk_backend import (  # type: ignore[import-not-found,unused-ignore]
    LocalDiskBackend,
)


def _bytes(block: Any) -> np.ndarray:
    return np.frombuffer(block.byte_array, np.uint8)


class LmCache:
    def __init__(self, directory: str, block_nbytes: int, num_blocks: int, batch: int, threads: int) -> None:
        total = block_nbytes * num_blocks
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            local_disk=f"file://{directory}/",
            max_local_disk_size=2.5 * total / 2**30,
            extra_config={"use_odirect": True, "disk_io_threads": threads},
        )
        allocator = MixedMemoryAllocator(3 * total + (64 << 20))
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self._cpu = LocalCPUBackend(config, dst_device="cpu", memory_allocator=allocator)
        self._disk = LocalDiskBackend(config, loop, self._cpu, dst_device="cpu")
        shape = torch.Size([2, 1, block_nbytes // 4, 1])
        torch.manual_seed(1)
        self._batch = batch
        self._generation = 0
        self._source: list[Any] = []
        for _ in range(num_blocks):
            block = self._cpu.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
            _bytes(block)[:] = torch.randint(0, 256, (block_nbytes,), dtype=torch.uint8).numpy()
            self._source.append(block)

    def _key(self, block: int) -> Any:
        return CacheEngineKey("bench", 1, 0, self._generation << 32 | block, torch.bfloat16)

    def put(self) -> float:
        """Put all blocks under new names, in batches; the oldest are evicted. Returns seconds."""
        self._generation += 1
        began_s = time.perf_counter()
        for first in range(0, len(self._source), self._batch):
            stored = threading.Semaphore(0)
            blocks = range(first, min(first + self._batch, len(self._source)))
            for block in blocks:
                # It gives back the reference that it takes.
                self._disk.submit_put_task(self._key(block), self._source[block], lambda _: stored.release())  # noqa: B023
            for _ in blocks:
                if not stored.acquire(timeout=60):
                    raise RuntimeError("a block was not stored within 60 s")
        return time.perf_counter() - began_s

    def get(self, order: list[int]) -> float:
        """Get all blocks in this order. Returns seconds."""
        began_s = time.perf_counter()
        for first in range(0, len(order), self._batch):
            blocks = order[first : first + self._batch]
            found = self._disk.batched_get_blocking([self._key(block) for block in blocks])
            for block, copy in zip(blocks, found, strict=True):
                if copy is None or (_bytes(copy)[:64] != _bytes(self._source[block])[:64]).any():
                    raise RuntimeError("a block that was read differs from the one that was written")
                copy.ref_count_down()
        return time.perf_counter() - began_s
