"""The client's connections to the store nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from moonpool.kvstore.client.errors import NoStoreNodes
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.runtime.errors import MoonpoolError
from moonpool.transfer import TransferAgent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeAddress:
    node_id: str
    epoch: int
    address: str  # host:port of its gRPC server
    healthy: bool = field(default=True, compare=False)  # False: new objects go elsewhere if possible
    host_id: str = field(default="", compare=False)  # equal for nodes that fail together; empty: unknown


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
            NodeAddress(
                record.node_id,
                record.epoch,
                record.rpc_address,
                record.state == "ready",
                str(record.extra.get("host_id", "")),
            )
            for record in (await self._index.nodes()).values()
            if record.role == "store" and record.state in ("ready", "unhealthy")
        ]

    async def aclose(self) -> None:
        await self._redis.aclose()


def preference_order(key: bytes, node_ids: Iterable[str]) -> list[str]:
    """The nodes in the order in which every client tries them for an object (rendezvous hashing): a node that
    joins or leaves moves only the objects for which it is first."""
    return sorted(node_ids, key=lambda node_id: blake2b(key + node_id.encode(), digest_size=8).digest())


# A lost node is noticed by its connection; only a new one waits for this.
_LOOK_EVERY_S = 5.0
_LOOK_AGAIN_S = 0.2


class StoreNodes:
    """``await current()`` for the nodes by id. ``close`` it before the agent."""

    def __init__(self, directory: Directory, agent: TransferAgent, where: str, *, deadline_s: float) -> None:
        self._directory = directory
        self._agent = agent
        self._where = where
        self._deadline_s = deadline_s
        self._nodes: dict[NodeAddress, RemoteStore] = {}
        self._by_id: dict[str, RemoteStore] = {}
        self._looked_s = float("-inf")
        self._looking = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def current(self, *, doubted: bool = False) -> Mapping[str, RemoteStore]:
        """``doubted``: something has changed; look up the nodes again, unless that was just done.

        Raises ``NoStoreNodes``, ``ApiError``, ``IndexUnavailable``; the last two only if no node is known
        yet.
        """
        async with self._looking:
            if time.monotonic() - self._looked_s > (_LOOK_AGAIN_S if doubted else _LOOK_EVERY_S):
                try:
                    await self._look()
                except MoonpoolError as error:
                    if not self._by_id:
                        raise
                    # The nodes known are used until the cluster answers.
                    self._looked_s = time.monotonic()
                    log.info("the store nodes were not looked up: %s", error)
            if not self._by_id:
                raise NoStoreNodes(self._where)
            return dict(self._by_id)

    async def _look(self) -> None:
        found = await self._directory.nodes()
        self._looked_s = time.monotonic() if found else float("-inf")
        gone = [self._nodes.pop(address) for address in list(self._nodes) if address not in found]
        for address in found:
            if address not in self._nodes:
                self._nodes[address] = RemoteStore(
                    address.node_id, address.address, self._agent, deadline_s=self._deadline_s
                )
            self._nodes[address].healthy = address.healthy
            self._nodes[address].host_id = address.host_id or address.node_id
        self._by_id = {address.node_id: node for address, node in self._nodes.items()}
        for node in gone:
            closing = asyncio.create_task(self._close_later(node))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close_later(self, node: RemoteStore) -> None:
        """Calls to it may be under way, which would end as if their caller had been cancelled."""
        try:
            await asyncio.sleep(2 * self._deadline_s)
        finally:
            await node.close()

    async def close(self) -> None:
        nodes, self._nodes, self._by_id = self._nodes, {}, {}
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*(node.close() for node in nodes.values()))
        await asyncio.gather(*self._closing, return_exceptions=True)
