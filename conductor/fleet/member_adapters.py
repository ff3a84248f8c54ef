"""The LoRA adapters of one node, asked for when its heartbeat tells of a change."""

from __future__ import annotations

import asyncio
import logging

from moonpool.conductor.fleet.node_client import NodeClient
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError

log = logging.getLogger(__name__)


class MemberAdapters:
    """A heartbeat has a version and no names. Until the node has answered, the names are as before."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client
        self._by_name: dict[str, node_pb2.Adapter] = {}
        self._version: object = None  # of what is in ``_by_name``
        self._asking: asyncio.Task[None] | None = None

    def get(self, name: str) -> node_pb2.Adapter | None:
        return self._by_name.get(name)

    def names(self) -> set[str]:
        return set(self._by_name)

    @property
    def asking(self) -> asyncio.Task[None] | None:
        """The call in progress; None: there is none."""
        return None if self._asking is None or self._asking.done() else self._asking

    def see(self, version: object) -> None:
        """The node's heartbeat has this version of its adapters; None: it has had none."""
        if version == self._version or self.asking is not None:
            return  # the next heartbeat asks again
        if version is None:
            self._by_name, self._version = {}, None
        elif self._client.connected:
            self._asking = asyncio.create_task(self._ask(version), name=f"adapters of {self._client.node_id}")

    async def _ask(self, version: object) -> None:
        try:
            adapters = await self._client.list_adapters()
        except MoonpoolError as error:
            log.warning("the adapters of %s are not known: %s", self._client.node_id, error)
            return
        self._by_name = {one.name: one for one in adapters}
        self._version = version
