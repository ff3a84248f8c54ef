"""Traces, and loads made here, replayed without timing: through a cache, and through memory over an SSD."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from time import process_time

from moonpool.bench.eviction.policies import CONTENDERS
from moonpool.kvstore.eviction import EvictionPolicy
from moonpool.kvstore.eviction.chain_cache import ChainCache

Request = Sequence[int]  # the ids of its blocks, in order; equal ids mean equal prefixes


@dataclass(frozen=True, slots=True)
class Replay:
    num_hits: int
    num_blocks: int  # of all requests
    seconds: float  # of CPU
    num_writes: int = 0  # of blocks to SSD

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_blocks


def replay(requests: Sequence[Request], policy: str, capacity: int) -> Replay:
    """Serve the requests in order from a cache of ``capacity`` blocks: a block is a hit when it is there at
    its turn; missing ones are added in order, as far as the policy takes them."""
    return replay_with(requests, CONTENDERS[policy](capacity), capacity)


def replay_with(requests: Sequence[Request], policy: EvictionPolicy, capacity: int) -> Replay:
    """As ``replay``, with a policy that has seen no request."""
    cache: ChainCache[int] = ChainCache(capacity, policy)
    num_hits = 0
    started_s = process_time()
    for blocks in requests:
        num_hit = cache.use(blocks)
        num_hits += num_hit
        insert(cache, blocks, num_hit)
    return Replay(num_hits, sum(map(len, requests)), process_time() - started_s)


def insert(cache: ChainCache[int], blocks: Request, num_hit: int) -> None:
    """Add the blocks of a request after its first ``num_hit``, which are there."""
    slots = cache.match(blocks)
    cache.pin(slots)
    for position in range(num_hit, len(blocks)):
        slot = cache.add(blocks[position], blocks[position - 1] if position else None)
        if slot is None:
            break
        slots.append(slot)
        cache.pin((slot,))
    cache.unpin(slots)


def optimum(requests: Sequence[Request], capacity: int) -> float:
    """The highest possible hit rate: keep the blocks that are used again soonest (Belady's rule)."""
    asked = [block for blocks in requests for block in blocks]
    next_use = [0] * len(asked)
    last: dict[int, int] = {}
    for at in range(len(asked) - 1, -1, -1):
        next_use[at] = last.get(asked[at], len(asked) + at)
        last[asked[at]] = at
    kept: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    num_hits = 0
    for at, block in enumerate(asked):
        num_hits += block in kept
        kept[block] = next_use[at]
        heappush(furthest, (-next_use[at], block))
        while len(kept) > capacity:
            use, victim = heappop(furthest)
            if kept.get(victim) == -use:
                del kept[victim]
    return num_hits / len(asked)


def no_reuse(rng: random.Random, num_requests: int = 6000) -> list[Request]:
    """Documents of 5 to 40 blocks, each read once."""
    first = 0
    requests: list[Request] = []
    for _ in range(num_requests):
        length = rng.randrange(5, 40)
        requests.append(range(first, first + length))
        first += length
    return requests


def heavy_reuse(rng: random.Random, num_requests: int = 6000, drift: int = 0) -> list[Request]:
    """3,000 prompts, Zipf 1.0, each followed by a question of up to five blocks.

    drift: after so many requests 50 other prompts become the most popular.
    """
    cumulative = list(accumulate(1 / (rank + 1) for rank in range(3000)))
    requests: list[Request] = []
    for number in range(num_requests):
        rank = bisect(cumulative, rng.random() * cumulative[-1])
        prompt = rank + (number // drift * 50 if drift else 0)
        length, question = 5 + prompt * 7919 % 40, rng.randrange(1, 6)
        blocks = [prompt * 1000 + block for block in range(length)]
        requests.append(blocks + [10**12 + number * 10 + block for block in range(question)])
    return requests


def drifting(rng: random.Random, num_requests: int = 6000) -> list[Request]:
    return heavy_reuse(rng, num_requests, drift=200)


def conversations(rng: random.Random, num_requests: int = 6000, think: float = 200.0) -> list[Request]:
    """Turns of 2 to 11 new blocks; seven of ten are followed by another, after ``think`` requests or so."""
    waiting: list[tuple[float, int, list[int]]] = []
    first = 0
    requests: list[Request] = []
    for number in range(num_requests):
        blocks = heappop(waiting)[2] if waiting and waiting[0][0] <= number else []
        length = rng.randrange(2, 12)
        blocks = blocks + list(range(first, first + length))
        first += length
        requests.append(blocks)
        if rng.random() < 0.7:
            heappush(waiting, (number + rng.expovariate(1 / think), number, blocks))
    return requests


def quick_conversations(rng: random.Random, num_requests: int = 6000) -> list[Request]:
    """The same with short pauses: only recency counts, and nothing can be learned."""
    return conversations(rng, num_requests, think=20.0)


GENERATED = {
    "no-reuse": no_reuse,
    "heavy-reuse": heavy_reuse,
    "drift": drifting,
    "conversations": conversations,
    "quick-conversations": quick_conversations,
}


# The write policies of the store, and one that writes an evicted block only if it was used again.
RULES = ("write-through", "write-back", "selective", "write-back of what was used again")


class Tiers:
    """Host memory over an SSD. Together they hold a prefix of each chain."""

    def __init__(self, rule: str, policy: str, host_blocks: int, ssd_blocks: int) -> None:
        """``policy``: of eviction from the SSD; host memory has ``prefix``."""
        self._rule = rule
        self.num_writes = 0
        self._uses: dict[int, int] = {}
        self._parents: dict[int, int | None] = {}
        self._lost: list[int] = []  # evicted from the SSD by this request
        self._host: ChainCache[int] = ChainCache(
            host_blocks, CONTENDERS["prefix"](host_blocks), on_evicted=self._evicted
        )
        self._ssd: ChainCache[int] = ChainCache(
            ssd_blocks,
            CONTENDERS[policy](ssd_blocks),
            on_evicted=lambda block, slot: self._lost.append(block),
        )

    def use(self, blocks: Request) -> int:
        """Serve a request. Returns its hits."""
        num_hits = next(
            (at for at, block in enumerate(blocks) if block not in self._host and block not in self._ssd),
            len(blocks),
        )
        for block, parent in zip(blocks, (None, *blocks), strict=False):
            self._uses[block] = self._uses.get(block, 0) + 1
            self._parents[block] = parent
        self._host.use(blocks)
        self._ssd.use(blocks)
        if self._rule == "selective" and num_hits:
            self._write(blocks[num_hits - 1])
        # Blocks on SSD are read into host memory; the new ones are put there.
        insert(self._host, blocks, len(self._host.match(blocks)))
        if self._rule == "write-through" and (held := len(self._host.match(blocks))):
            self._write(blocks[held - 1])
        for lost in self._lost:
            if lost not in self._host and lost not in self._ssd:
                for orphan in self._host.after(lost):
                    self._host.remove(orphan)
        self._lost.clear()
        return num_hits

    def _evicted(self, block: int, slot: int) -> None:
        if self._rule == "write-back" or (self._rule == RULES[-1] and self._uses[block] > 1):
            self._write(block)

    def _write(self, block: int) -> None:
        """Write a block after its predecessors, as far as the SSD takes them."""
        missing: list[int] = []
        here: int | None = block
        while here is not None and here not in self._ssd:
            missing.append(here)
            here = self._parents[here]
        above = [] if here is None else self._ssd.lineage(here)
        self._ssd.pin(above)
        for each in reversed(missing):
            slot = self._ssd.add(each, self._parents[each])
            if slot is None:
                break
            self.num_writes += 1
            self._ssd.pin((slot,))
            above.append(slot)
        self._ssd.unpin(above)


def replay_writes(
    requests: Sequence[Request], rule: str, policy: str, host_blocks: int, ssd_blocks: int
) -> Replay:
    """Hits are in either tier."""
    tiers, started_s = Tiers(rule, policy, host_blocks, ssd_blocks), process_time()
    num_hits = sum(tiers.use(blocks) for blocks in requests)
    return Replay(num_hits, sum(map(len, requests)), process_time() - started_s, tiers.num_writes)
