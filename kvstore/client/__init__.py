"""The client of the store nodes: objects by name, moved directly from and to the caller's memory."""

from moonpool.kvstore.client.queries import ObjectStat
from moonpool.kvstore.client.store import StoreClient, open_client
from moonpool.kvstore.client.tenant import Tenant

__all__ = ["ObjectStat", "StoreClient", "Tenant", "open_client"]
