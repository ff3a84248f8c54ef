"""Seconds saved by a hit in each tier, from the node's measured costs."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.eviction.savings import Costs, saved_s
from moonpool.kvstore.store import TieredStore
from moonpool.runtime.cost_profile import CostProfile


class EvictionSavings:
    """``host`` and ``ssd`` are for the tiers' eviction policies. Set ``store`` when it exists: it measures
    loads."""

    def __init__(self, layout: KVLayout, profile: Callable[[], dict[str, float]]) -> None:
        """``profile``: ``Engine.profile``."""
        self.store: TieredStore | None = None
        self._layout = layout
        self._profile = profile

    def host(self, position: int) -> float:
        host_rate, ssd_rate = self._load_rates()
        return saved_s(self._costs(host_rate, ssd_rate), position)

    def ssd(self, position: int) -> float:
        # No tier is below the disk.
        return saved_s(self._costs(self._load_rates()[1], 0.0), position)

    def _load_rates(self) -> tuple[float, float]:
        if self.store is None:
            return 0.0, 0.0
        stats = self.store.stats
        return stats.host_load_nbytes_per_s, stats.ssd_load_nbytes_per_s

    def _costs(self, load_nbytes_per_s: float, below_nbytes_per_s: float) -> Costs:
        return Costs(
            block_size=self._layout.block_size,
            block_nbytes=self._layout.block_nbytes,
            profile=CostProfile(**self._profile()),
            load_nbytes_per_s=load_nbytes_per_s,
            below_nbytes_per_s=below_nbytes_per_s,
        )
