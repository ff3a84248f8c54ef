"""The client's connections to the store nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from moonpool.kvstore.client.discovery import Directory, NodeAddress
from moonpool.kvstore.client.errors import NoStoreNodes
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.transfer import TransferAgent

# A lost node is noticed by its connection; only a new one waits for this.
_LOOK_EVERY_S = 5.0
_LOOK_AGAIN_S = 0.2


class StoreNodes:
    """``await current()`` for the nodes by id. ``close`` it before the agent."""

    def __init__(
        self,
        directory: Directory,
        agent: TransferAgent,
        where: str,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._agent = agent
        self._where = where
        self._deadline_s = deadline_s
        self._clock = clock
        self._nodes: dict[NodeAddress, RemoteStore] = {}
        self._by_id: dict[str, RemoteStore] = {}
        self._looked_s = float("-inf")
        self._looking = asyncio.Lock()

    async def current(self, *, doubted: bool = False) -> Mapping[str, RemoteStore]:
        """``doubted``: something has changed; look up the nodes again, unless that was just done.

        Raises ``NoStoreNodes``, ``ApiError``, ``IndexUnavailable``.
        """
        async with self._looking:
            if self._clock() - self._looked_s > (_LOOK_AGAIN_S if doubted else _LOOK_EVERY_S):
                await self._look()
            if not self._by_id:
                raise NoStoreNodes(self._where)
            return dict(self._by_id)

    async def _look(self) -> None:
        found = await self._directory.nodes()
        self._looked_s = self._clock() if found else float("-inf")
        gone = [self._nodes.pop(address) for address in list(self._nodes) if address not in found]
        for address in found:
            if address not in self._nodes:
                self._nodes[address] = RemoteStore(
                    address.node_id, address.address, self._agent, deadline_s=self._deadline_s
                )
            self._nodes[address].healthy = address.healthy
        self._by_id = {address.node_id: node for address, node in self._nodes.items()}
        await asyncio.gather(*(node.close() for node in gone))

    async def close(self) -> None:
        nodes, self._nodes, self._by_id = self._nodes, {}, {}
        await asyncio.gather(*(node.close() for node in nodes.values()))
