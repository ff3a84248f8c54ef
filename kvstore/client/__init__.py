"""The client of the store nodes: objects by name, moved straight from and to the caller's memory."""

from kvstore.client.asking import ObjectStat
from kvstore.client.store_client import StoreClient, open_client
from kvstore.client.tenant import Tenant

__all__ = ["ObjectStat", "StoreClient", "Tenant", "open_client"]
