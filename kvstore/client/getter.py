"""Reads of objects: the nodes tried for each, and one request to each node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from moonpool.kvstore.client.connections import StoreNodes, preference_order
from moonpool.kvstore.client.download import Array, GetRequest, receive
from moonpool.kvstore.client.errors import NoNodeAnswered, ObjectMissing
from moonpool.kvstore.client.memory import LocalMemory
from moonpool.kvstore.client.putter import ROUND_OBJECTS
from moonpool.kvstore.client.queries import find_all
from moonpool.kvstore.client.tenant import Tenant
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.runtime.errors import NodeUnavailable
from moonpool.transfer import GrantLapsed, TransferError

log = logging.getLogger(__name__)


class Getter:
    def __init__(self, nodes: StoreNodes, memory: LocalMemory, tenant: Tenant) -> None:
        self._nodes = nodes
        self._memory = memory
        self._tenant = tenant

    async def get(self, requests: Sequence[GetRequest], required: bool) -> list[Array | None]:
        received: list[Array | None] = []
        for first in range(0, len(requests), ROUND_OBJECTS):
            received += await self._get_round(requests[first : first + ROUND_OBJECTS], required)
        return received

    async def _get_round(self, requests: Sequence[GetRequest], required: bool) -> list[Array | None]:
        nodes = await self._nodes.current()
        received: list[Array | None] = [None] * len(requests)
        unreachable: set[str] = set()
        # First the most likely node for each; then, for missing ones, the nodes that say they have them.
        tried = [{preference_order(request.key, nodes)[0]} for request in requests]
        plan: dict[str, list[int]] = {}
        for number, (likely,) in enumerate(tried):
            plan.setdefault(likely, []).append(number)
        while plan:
            missing = await self._read(nodes, plan, requests, received, unreachable)
            plan = {}
            if missing:
                nodes = await self._nodes.current(doubted=True)
                keys = [requests[number].key for number in missing]
                found = await find_all(nodes, self._tenant.owner, keys, unreachable)
                for number, key in zip(missing, keys, strict=True):
                    holders = found[key].nodes if key in found else ()
                    untried = [each for each in preference_order(key, holders) if each not in tried[number]]
                    if untried:
                        tried[number].add(untried[0])
                        plan.setdefault(untried[0], []).append(number)
        absent = [request.name for request, each in zip(requests, received, strict=True) if each is None]
        if absent and unreachable >= nodes.keys():
            raise NoNodeAnswered(sorted(nodes))
        if absent and required:
            raise ObjectMissing(absent[0], sorted(unreachable))
        if absent and unreachable:
            log.warning("%d objects were not found; %s did not answer", len(absent), sorted(unreachable))
        return received

    async def _read(
        self,
        nodes: Mapping[str, RemoteStore],
        plan: Mapping[str, Sequence[int]],
        requests: Sequence[GetRequest],
        received: list[Array | None],
        unreachable: set[str],
    ) -> list[int]:
        """Read from each node of ``plan`` the requests it lists. Returns the requests that it could not
        serve."""

        async def read_from(node_id: str, numbers: Sequence[int]) -> list[Array | None]:
            wanted = [requests[number] for number in numbers]
            try:
                return await receive(nodes[node_id], self._memory, self._tenant.owner, wanted)
            except GrantLapsed:
                raise
            except (NodeUnavailable, TransferError) as error:
                log.info("nothing was read from %s: %s", node_id, error)
                nodes[node_id].forget_peer()
                unreachable.add(node_id)
                return [None] * len(numbers)

        answers = await asyncio.gather(*(read_from(*entry) for entry in plan.items()))
        missing: list[int] = []
        for numbers, answer in zip(plan.values(), answers, strict=True):
            for number, each in zip(numbers, answer, strict=True):
                received[number] = each
                if each is None:
                    missing.append(number)
        return missing
