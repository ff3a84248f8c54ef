"""The store as programs and people use it: the Python client, and ``moonpool store``."""

from moonpool.store.asking import ObjectStat
from moonpool.store.client import StoreClient, connect

__all__ = ["ObjectStat", "StoreClient", "connect"]
