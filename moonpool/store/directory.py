"""Which store nodes there are, and in what order an object's are tried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import urlsplit

from kvstore.errors import StoreError
from kvstore.index import KVIndex
from kvstore.redis_client import connect
from moonpool.client import Client
from moonpool.store.errors import BadUrl


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A store node in one life."""

    node_id: str
    epoch: int
    address: str  # host:port of its gRPC server


class Directory(Protocol):
    """Where a client learns of the store nodes. ``async with``, or ``close``."""

    async def nodes(self) -> list[NodeAddress]:
        """Those that are ready now.

        Raises ``ApiError`` or ``IndexUnavailable``: nobody there to ask.
        """
        ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_directory(url: str, namespace: str) -> Directory:
    """By the URL's scheme. Raises ``BadUrl``."""
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        return ApiDirectory(url)
    try:
        return IndexDirectory(url, namespace)
    except (StoreError, ValueError) as error:
        raise BadUrl(url) from error


class _Closing:
    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class ApiDirectory(_Closing):
    """Asks a conductor."""

    def __init__(self, url: str) -> None:
        self._client = Client(url)

    async def nodes(self) -> list[NodeAddress]:
        return [
            NodeAddress(node["node_id"], int(node["epoch"]), node["rpc_address"])
            for node in (await self._client.cluster())["nodes"]
            if node["role"] == "store" and node["state"] == "ready"
        ]

    async def close(self) -> None:
        await self._client.__aexit__(None, None, None)


class IndexDirectory(_Closing):
    """Asks the index in Redis: no conductor is needed."""

    def __init__(self, url: str, namespace: str) -> None:
        self._redis = connect(url)
        self._index = KVIndex(self._redis, namespace)

    async def nodes(self) -> list[NodeAddress]:
        return [
            NodeAddress(record.node_id, record.epoch, record.rpc_address)
            for record in (await self._index.nodes()).values()
            if record.role == "store" and record.state == "ready"
        ]

    async def close(self) -> None:
        await self._redis.aclose()


def rank(key: bytes, node_ids: Iterable[str]) -> list[str]:
    """The nodes in the order in which they are tried for an object, the same for every client (rendezvous
    hashing): a node that comes or goes moves only the objects it is first for."""
    return sorted(node_ids, key=lambda node_id: blake2b(key + node_id.encode(), digest_size=8).digest())
