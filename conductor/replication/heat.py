"""Demand for prefixes: decayed counts in bounded memory."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.kvstore.blocks.keys import BlockKey

# Uses within less time than this give no rate.
_LEAST_AGE_S = 5.0


@dataclass(slots=True)
class HotChain:
    """A prefix that was the longest hit of some requests."""

    keys: tuple[BlockKey, ...]
    heat: float = 0.0  # decayed uses
    work_s: float = 0.0  # decayed compute time of those uses
    since_s: float = 0.0  # when it was first used
    at_s: float = 0.0  # when it was last used
    hits: int = 0  # requests that began with all of it, and had it from a cache
    misses: int = 0  # and computed some of it
    tenant: str = ""  # of the latest of those: keys are of one tenant
    digests: tuple[int, ...] = ()  # its beginning as routers of cells know it: see ``cells.prefixes``


class Heat:
    """Counts uses of chains by their last block; a use is worth half after ``half_life_s``.

    At most ``capacity`` chains are kept; beyond, the coldest quarter is dropped.
    """

    def __init__(self, half_life_s: float = 30.0, capacity: int = 1024) -> None:
        self._half_life_s = half_life_s
        self._capacity = capacity
        self._chains: dict[BlockKey, HotChain] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def touch(
        self,
        keys: Sequence[BlockKey],
        now_s: float,
        compute_s: float = 0.0,
        digests: Sequence[int] = (),
    ) -> None:
        """A request was placed. ``keys``: its longest prefix on any node; ``compute_s``: of the rest;
        ``digests``: of the request, if a router wants them."""
        if not keys:
            return
        chain = self._chains.get(keys[-1])
        if chain is None:
            if len(self._chains) >= self._capacity:
                self._forget(now_s)
            chain = self._chains[keys[-1]] = HotChain(tuple(keys), since_s=now_s, at_s=now_s)
        fade = self._fade(chain, now_s)
        chain.heat = chain.heat * fade + 1.0
        chain.work_s = chain.work_s * fade + compute_s
        chain.at_s = now_s
        if digests:
            # Those that all its requests have in common; of requests that only templates make alike: none.
            common = digests[: common_blocks(chain.digests, digests)]
            chain.digests = tuple(common or digests)

    def count(self, keys: Sequence[BlockKey], num_used: int, tenant: str) -> None:
        """A request was placed; its first ``num_used`` blocks are not computed. A look-up for each block."""
        for chain in filter(None, map(self._chains.get, keys)):
            if len(chain.keys) <= num_used:
                chain.hits += 1
            else:
                chain.misses += 1
            chain.tenant = tenant

    def hottest(self, count: int, now_s: float) -> list[HotChain]:
        """The hottest first, by uses, then by key."""
        return heapq.nsmallest(
            count, self._chains.values(), key=lambda c: (-c.heat * self._fade(c, now_s), c.keys[-1])
        )

    def uses(self, chain: HotChain, now_s: float) -> float:
        """Decayed uses."""
        return chain.heat * self._fade(chain, now_s)

    def uses_per_s(self, chain: HotChain, now_s: float) -> float:
        """Recent uses a second."""
        return chain.heat * self._per_s(chain, now_s)

    def nodes_worth(self, chain: HotChain, now_s: float) -> float:
        """Number of nodes that its requests keep busy."""
        return chain.work_s * self._per_s(chain, now_s)

    def of(self, key: BlockKey) -> HotChain | None:
        """The chain that ends with ``key``."""
        return self._chains.get(key)

    def _per_s(self, chain: HotChain, now_s: float) -> float:
        """The factor from a decayed sum to a rate, corrected for chains younger than the decay."""
        age_s = max(now_s - chain.since_s, _LEAST_AGE_S)
        full = 1 - math.exp2(-age_s / self._half_life_s)
        return self._fade(chain, now_s) * math.log(2) / (self._half_life_s * full)

    def _fade(self, chain: HotChain, now_s: float) -> float:
        return math.exp2(-max(now_s - chain.at_s, 0.0) / self._half_life_s)

    def _forget(self, now_s: float) -> None:
        kept = self.hottest(3 * self._capacity // 4, now_s)
        self._chains = {chain.keys[-1]: chain for chain in kept}


def common_blocks(keys: Sequence[object], others: Sequence[object]) -> int:
    """The number of equal leading elements. They are chained: where two are equal, so are all before."""
    return bisect_left(range(min(len(keys), len(others))), True, key=lambda i: keys[i] != others[i])
