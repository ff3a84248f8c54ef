"""Prompts that hints keep in host memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.store import TieredStore

# Part of host memory that hints may pin: the rest is for what requests use now.
_MOST_PINNED = 0.5


@dataclass(frozen=True, slots=True)
class _Pin:
    lease_id: int
    num_blocks: int
    until_s: float


class PinnedPrompts:
    """Each pin is a lease of the store, so it ends by itself. One event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pins: dict[BlockKey, _Pin] = {}  # by the last block
        self._pinning = asyncio.Lock()

    async def pin(self, store: TieredStore, keys: Sequence[BlockKey], ttl_s: float) -> str:
        """Keep the longest prefix of ``keys`` in memory for ``ttl_s``, ``store.lease_ttl_s`` at most.

        It takes the place of pins of its beginnings. Returns "done", "missing" (no block is held) or
        "refused" (too much of host memory is pinned).
        """
        async with self._pinning:
            now_s = self._clock()
            self._pins = {last: pin for last, pin in self._pins.items() if pin.until_s > now_s}
            beginnings = self._pins.keys() & set(keys)
            num_others = sum(pin.num_blocks for last, pin in self._pins.items() if last not in beginnings)
            if num_others + len(keys) > _MOST_PINNED * store.host.capacity:
                return "refused"
            lease = await store.pin(keys, ttl_s, "a hint")
            if not lease.id:
                return "missing"
            for last in beginnings:
                if (pin := self._pins.pop(last, None)) is not None:
                    store.release(pin.lease_id)
            last = keys[len(lease.blocks) - 1]
            self._pins[last] = _Pin(lease.id, len(lease.blocks), now_s + lease.granted_s)
            return "done"

    def release_all(self, store: TieredStore) -> None:
        for pin in self._pins.values():
            store.release(pin.lease_id)
        self._pins.clear()
