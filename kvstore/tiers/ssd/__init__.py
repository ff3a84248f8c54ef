"""Blocks on disk: payloads in segment files read and written around the page cache, an index in LMDB."""

from moonpool.kvstore.tiers.ssd.storage import SsdTier

__all__ = ["SsdTier"]
