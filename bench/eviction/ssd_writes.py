"""Blocks written to SSD, and hits, by write policy: a replay of host memory over an SSD, without timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.bench.eviction.policies import CONTENDERS
from moonpool.bench.eviction.replay import Request, insert
from moonpool.kvstore.eviction.chain_cache import ChainCache

# The write policies of the store, and one that writes an evicted block only if it was used again.
RULES = ("write-through", "write-back", "selective", "write-back of what was used again")


@dataclass(frozen=True, slots=True)
class Writes:
    num_hits: int  # in either tier
    num_writes: int  # of blocks to SSD
    num_blocks: int  # of all requests

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_blocks


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
            ssd_blocks, CONTENDERS[policy](ssd_blocks), on_evicted=self._dropped
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

    def _dropped(self, block: int, slot: int) -> None:
        self._lost.append(block)

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
) -> Writes:
    tiers = Tiers(rule, policy, host_blocks, ssd_blocks)
    num_hits = sum(tiers.use(blocks) for blocks in requests)
    return Writes(num_hits, tiers.num_writes, sum(map(len, requests)))
