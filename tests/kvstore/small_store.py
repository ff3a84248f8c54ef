"""Stores of a few small blocks with bytes that are derived from their keys."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.store import TieredStore
from moonpool.runtime.config.options import HostTierOptions, SsdTierOptions, StoreOptions
from tests.kvstore.memory_disk import MemoryDisk
from tests.kvstore.nodes import chain

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=4, head_dim=4, dtype="float32")
NBYTES = LAYOUT.block_nbytes
LRU = StoreOptions(host=HostTierOptions(policy="lru"), ssd=SsdTierOptions(queue_nbytes=64 * NBYTES))


def payload(name: BlockKey) -> np.ndarray:
    return np.frombuffer(random.Random(name).randbytes(NBYTES), np.uint8)


class Listener:
    """What the index would be told."""

    def __init__(self) -> None:
        self.tiers: dict[BlockKey, Tier] = {}

    def __call__(self, name: BlockKey, tier: Tier | None) -> None:
        if tier is None:
            self.tiers.pop(name, None)
        else:
            self.tiers[name] = tier


def make(num_blocks: int, options: StoreOptions = LRU, **kwargs: Any) -> TieredStore:
    return TieredStore(LAYOUT, options, np.zeros(num_blocks * NBYTES, np.uint8), **kwargs)


async def put(store: TieredStore, length: int, number: int = 0) -> int:
    keys = chain(length, number)
    return await store.put(keys, [payload(k) for k in keys])


async def get(store: TieredStore, length: int, number: int = 0) -> list[Tier]:
    keys = chain(length, number)
    spans = [np.zeros(NBYTES, np.uint8) for _ in keys]
    tiers = await store.get(keys, spans)
    for name, span in zip(keys, spans, strict=True):
        assert np.array_equal(span, payload(name))
    return tiers


async def with_disk(
    num_blocks: int,
    num_on_disk: int,
    *,
    write_policy: str = "write-back",
    watermark: float = 0.5,
    queue_blocks: int = 64,
    **kwargs: Any,
) -> tuple[TieredStore, MemoryDisk]:
    disk = MemoryDisk(num_on_disk)
    options = replace(
        LRU,
        write_policy=write_policy,
        host=HostTierOptions(policy="lru", watermark=watermark),
        ssd=SsdTierOptions(queue_nbytes=queue_blocks * NBYTES),
    )
    store = make(num_blocks, options, ssd=disk, **kwargs)
    await store.start()
    return store, disk


async def settled(store: TieredStore) -> None:
    """Nothing waits to be written."""
    await store.writes.drained()
