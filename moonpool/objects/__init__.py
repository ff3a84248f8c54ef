"""The store as programs and people use it: ``moonpool.connect``, and the command ``moonpool store``."""

from moonpool.kvstore.client import ObjectStat, StoreClient
from moonpool.objects.discovery import connect

__all__ = ["ObjectStat", "StoreClient", "connect"]
