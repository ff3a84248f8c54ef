"""Blocks that clients asked to keep for a while: evicted after all others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Ended entries are removed this often: it takes time proportional to all.
_SWEEP_S = 5.0


class KeptBlocks(Generic[Key]):
    """Keys of blocks, in whatever tier of a node, and until when they are kept. False if there are none.

    A tier evicts a kept block only where no other block can go, so nothing ever waits for the end of one.
    Blocks count whether they are still held or not: what a tenant keeps is bounded.
    """

    def __init__(self, most_blocks: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """``most_blocks``: of all tenants together."""
        self._most_blocks = most_blocks
        self._clock = clock
        self._entries: dict[Key, tuple[float, str]] = {}  # until when, and the tenant
        self._num_kept: dict[str, int] = {}  # by tenant
        self._sweep_s = math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        entry = self._entries.get(key)  # type: ignore[arg-type]
        return entry is not None and entry[0] > self._clock()

    def num_kept(self, tenant: str) -> int:
        return self._num_kept.get(tenant, 0)

    def keep(self, tenant: str, chain: Sequence[Key], keep_s: float, most_blocks: int) -> int:
        """Keep the first blocks of ``chain``, as many as the bounds allow. A later end given before stays.

        ``most_blocks``: of this tenant. Returns how many of the chain are kept now.
        """
        now_s = self._clock()
        if now_s > self._sweep_s or len(self) + len(chain) > self._most_blocks:
            self._sweep(now_s)
        until_s = now_s + keep_s
        self._sweep_s = min(self._sweep_s, max(until_s, now_s + _SWEEP_S))
        for position, key in enumerate(chain):
            known = self._entries.get(key)
            if known is not None:
                self._entries[key] = max(known[0], until_s), known[1]
                continue
            if len(self) >= self._most_blocks or self.num_kept(tenant) >= most_blocks:
                return position
            self._entries[key] = until_s, tenant
            self._num_kept[tenant] = self.num_kept(tenant) + 1
        return len(chain)

    def forget(self, keys: Iterable[Key]) -> None:
        """Keep these no longer. Unknown ones are no error."""
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                tenant = entry[1]
                self._num_kept[tenant] -= 1
                if not self._num_kept[tenant]:
                    del self._num_kept[tenant]

    def _sweep(self, now_s: float) -> None:
        self.forget([key for key, (until_s, _) in self._entries.items() if until_s <= now_s])
        earliest_s = min((until_s for until_s, _ in self._entries.values()), default=math.inf)
        self._sweep_s = max(earliest_s, now_s + _SWEEP_S)
