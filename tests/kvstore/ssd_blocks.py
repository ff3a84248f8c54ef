"""Blocks with bytes derived from their keys, and tiers on disk to put them in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.tiers.ssd import SsdTier

# No multiple of a page: slots are padded.
LAYOUT = OpaqueLayout(6000, b"ssd-tests-16byte")
SLOT_NBYTES = 8192


def payload(key: BlockKey) -> np.ndarray:
    """uint8 [block_nbytes]"""
    return np.frombuffer(random.Random(key).randbytes(LAYOUT.block_nbytes), np.uint8)


def parents_of(keys: Sequence[BlockKey], before: BlockKey | None = None) -> list[BlockKey | None]:
    return [before, *keys[:-1]]


async def open_tier(
    directory: Path, slots: int = 64, *, io_deadline_s: float = 60.0, **options: Any
) -> SsdTier:
    """``io_deadline_s``: so long that no disk others keep busy is taken for one that hangs."""
    return await SsdTier.open(
        directory,
        LAYOUT,
        capacity_nbytes=slots * SLOT_NBYTES,
        segment_nbytes=16 * SLOT_NBYTES,
        io_deadline_s=io_deadline_s,
        **options,
    )


async def put_chain(tier: SsdTier, keys: Sequence[BlockKey], before: BlockKey | None = None) -> list[bool]:
    return await tier.put(keys, [payload(key) for key in keys], parents=parents_of(keys, before))


async def get(tier: SsdTier, keys: Sequence[BlockKey]) -> list[np.ndarray | None]:
    into = [np.zeros(LAYOUT.block_nbytes, np.uint8) for _ in keys]
    hits = await tier.get(keys, into)
    return [block if hit else None for block, hit in zip(into, hits, strict=True)]


def match(tier: SsdTier, keys: Sequence[BlockKey]) -> list[int]:
    """Slots of the longest prefix that is held."""
    return tier._slot_map.cache.match(keys)


async def evict(tier: SsdTier, num_blocks: int) -> list[BlockKey]:
    """Remove the blocks that would be evicted next."""
    cache, gone = tier._slot_map.cache, []
    while len(gone) < num_blocks and (key := cache.policy.victim(lambda name: True)) is not None:
        while children := cache._children.get(key):
            key = next(iter(children))
        gone += await tier.remove([key])
    return gone


async def check_every_block(tier: SsdTier) -> int:
    """Every block it says it has is byte-exact, and has those before it. Returns how many there are."""
    tier.check_integrity()
    keys = tier.keys()
    for key, found in zip(keys, await get(tier, keys), strict=True):
        assert found is not None, f"{key.hex()} is held and cannot be had"
        assert np.array_equal(found, payload(key)), f"{key.hex()} has other bytes"
    return len(keys)
