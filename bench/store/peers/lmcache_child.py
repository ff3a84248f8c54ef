"""LMCache's local disk backend with O_DIRECT: a file a block; neither synced nor checksummed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
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

from moonpool.bench.store.peers.child_protocol import serve


def _bytes(block: Any) -> np.ndarray:
    return np.frombuffer(block.byte_array, np.uint8)


class LmCache:
    def __init__(self, directory: Path, block_nbytes: int, num_blocks: int, threads: int) -> None:
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
        self._source: list[Any] = []
        for _ in range(num_blocks):
            block = self._cpu.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
            _bytes(block)[:] = torch.randint(0, 256, (block_nbytes,), dtype=torch.uint8).numpy()
            self._source.append(block)

    def _key(self, generation: int, block: int) -> Any:
        return CacheEngineKey("bench", 1, 0, generation << 32 | block, torch.bfloat16)

    def put(self, generation: int, blocks: Sequence[int]) -> None:
        stored = threading.Semaphore(0)
        for block in blocks:
            # It gives back the reference it takes.
            key = self._key(generation, block)
            self._disk.submit_put_task(key, self._source[block], lambda _: stored.release())
        for _ in blocks:
            if not stored.acquire(timeout=60):
                raise RuntimeError("a block was not stored")

    def get(self, generation: int, blocks: Sequence[int]) -> None:
        found = self._disk.batched_get_blocking([self._key(generation, block) for block in blocks])
        for block, copy in zip(blocks, found, strict=True):
            if copy is None or (_bytes(copy)[:64] != _bytes(self._source[block])[:64]).any():
                raise RuntimeError("what came back is not what was put")
            copy.ref_count_down()

    def forget(self, generation: int) -> None:
        """It evicts what is oldest by itself."""


if __name__ == "__main__":
    serve(LmCache)
