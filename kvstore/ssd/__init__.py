"""Blocks on disk: payloads in segment files read and written around the page cache, their index in LMDB."""

from kvstore.ssd.stats import SsdTierStats
from kvstore.ssd.tier import SsdTier

__all__ = ["SsdTier", "SsdTierStats"]
