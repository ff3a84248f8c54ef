"""The store as programs and people use it: ``moonpool.connect``, and the command ``moonpool store``."""

from kvstore.client import ObjectStat, StoreClient
from moonpool.store.connect import connect

__all__ = ["ObjectStat", "StoreClient", "connect"]
