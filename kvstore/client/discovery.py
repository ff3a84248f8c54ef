"""Which store nodes there are, and in what order an object's are tried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A store node in one life."""

    node_id: str
    epoch: int
    address: str  # host:port of its gRPC server
    healthy: bool = field(default=True, compare=False)  # False: new objects go elsewhere if they can


class Directory(Protocol):
    """Where a client learns of the store nodes."""

    async def nodes(self) -> list[NodeAddress]:
        """Those that serve now.

        Raises ``ApiError`` or ``IndexUnavailable``: nobody there to ask.
        """
        ...

    async def aclose(self) -> None: ...


class IndexDirectory:
    """Asks the index in Redis: no conductor is needed."""

    def __init__(self, url: str, namespace: str) -> None:
        """Raises ``StoreError``: no such kind of URL."""
        self._redis = connect(url)
        self._index = KVIndex(self._redis, namespace)

    async def nodes(self) -> list[NodeAddress]:
        # Unhealthy ones too: what they hold is nowhere else.
        return [
            NodeAddress(record.node_id, record.epoch, record.rpc_address, record.state == "ready")
            for record in (await self._index.nodes()).values()
            if record.role == "store" and record.state in ("ready", "unhealthy")
        ]

    async def aclose(self) -> None:
        await self._redis.aclose()


def preference_order(key: bytes, node_ids: Iterable[str]) -> list[str]:
    """The nodes in the order in which they are tried for an object, the same for every client (rendezvous
    hashing): a node that comes or goes moves only the objects it is first for."""
    return sorted(node_ids, key=lambda node_id: blake2b(key + node_id.encode(), digest_size=8).digest())
