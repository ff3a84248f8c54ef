"""The store as programs and people use it: the Python client, and ``moonpool store``."""

from moonpool.store.client import ObjectStat, StoreClient, connect

__all__ = ["ObjectStat", "StoreClient", "connect"]
