"""The store nodes of a cluster, and the order in which they are tried for an object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A store node in one epoch."""

    node_id: str
    epoch: int
    address: str  # host:port of its gRPC server
    healthy: bool = field(default=True, compare=False)  # False: new objects go elsewhere if possible


class Directory(Protocol):
    """A client's source of store nodes."""

    async def nodes(self) -> list[NodeAddress]:
        """The nodes that serve now. Raises ``ApiError``, ``IndexUnavailable``."""
        ...

    async def aclose(self) -> None: ...


class IndexDirectory:
    """Reads the index in Redis, without a conductor."""

    def __init__(self, url: str, namespace: str) -> None:
        """Raises ``StoreError``: the URL has an unknown scheme."""
        self._redis = connect(url)
        self._index = KVIndex(self._redis, namespace)

    async def nodes(self) -> list[NodeAddress]:
        # Unhealthy ones too: their objects may be nowhere else.
        return [
            NodeAddress(record.node_id, record.epoch, record.rpc_address, record.state == "ready")
            for record in (await self._index.nodes()).values()
            if record.role == "store" and record.state in ("ready", "unhealthy")
        ]

    async def aclose(self) -> None:
        await self._redis.aclose()


def preference_order(key: bytes, node_ids: Iterable[str]) -> list[str]:
    """The nodes in the order in which every client tries them for an object (rendezvous hashing): a node that
    joins or leaves moves only the objects for which it is first."""
    return sorted(node_ids, key=lambda node_id: blake2b(key + node_id.encode(), digest_size=8).digest())
