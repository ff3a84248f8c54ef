"""Reads of objects: the record says what a name means and where its bytes are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moonpool.kvstore.client.connections import StoreNodes, preference_order
from moonpool.kvstore.client.download import Array, GetRequest, NotHere, receive
from moonpool.kvstore.client.errors import NoNodeAnswered, NoRecords, ObjectMissing, ObjectUnreachable
from moonpool.kvstore.client.memory import LocalMemory
from moonpool.kvstore.client.putter import ROUND_OBJECTS
from moonpool.kvstore.client.queries import Refusals, find
from moonpool.kvstore.client.tenant import Tenant
from moonpool.kvstore.remote.object_store import RemoteStore, SourceBusy
from moonpool.runtime.errors import NodeUnavailable, RemoteError
from moonpool.runtime.service.vital import cancel_and_wait
from moonpool.transfer import GrantLapsed, TransferError

log = logging.getLogger(__name__)

# Looks at a record that names places without the bytes: each means that the object was replaced, or repaired.
_MOST_LOOKS = 5


@dataclass(slots=True, eq=False)
class _Search:
    """One object of a batch. ``storage`` and ``places`` as its record was last seen; 0: not seen yet."""

    request: GetRequest
    storage: int = 0
    places: tuple[str, ...] = ()
    gone: set[str] = field(default_factory=set)  # places that do not have these bytes any more
    silent: set[str] = field(default_factory=set)  # places that did not answer
    lapsed: str = ""  # a place granted its memory for too short a time: its words
    found: Array | None = None
    done: bool = False

    def answered(self, answer: Array | NotHere, node_id: str, *, storage: bool) -> None:
        """A node was asked for these bytes (``storage``), or for what the record names."""
        if not isinstance(answer, NotHere):
            self.found, self.done = answer, True
            return
        if not storage:
            if answer.storage != self.storage:
                self.gone, self.silent = set(), set()
            self.storage, self.places, self.done = answer.storage, answer.places, not answer.storage
        self.gone.add(node_id)

    def unreachable(self) -> Exception:
        return ObjectUnreachable(self.request.name, self.places, self.lapsed)


class Getter:
    def __init__(self, nodes: StoreNodes, memory: LocalMemory, tenant: Tenant) -> None:
        self._nodes = nodes
        self._memory = memory
        self._tenant = tenant

    async def get(
        self, requests: Sequence[GetRequest], required: bool, stale: set[str] | None
    ) -> list[Array | None]:
        received: list[Array | None] = []
        for first in range(0, len(requests), ROUND_OBJECTS):
            searches = [_Search(request) for request in requests[first : first + ROUND_OBJECTS]]
            try:
                await self._search(searches)
            except (NoRecords, NoNodeAnswered):
                if stale is None:
                    raise
                await self._search_last_known(searches, stale)
            for search in searches:
                if search.found is None and required:
                    raise ObjectMissing(search.request.name)
                received.append(search.found)
        return received

    async def _search(self, searches: Sequence[_Search]) -> None:
        """Read the object of each, or find that there is none.

        Raises ``NoRecords``, ``NoNodeAnswered``; ``ObjectUnreachable``: the places that may have it are
        silent, or granted their memory for too short a time.
        """
        waiting = list(searches)
        for look in range(_MOST_LOOKS):
            nodes = await self._nodes.current(doubted=look > 0)
            before = [each.storage for each in waiting]
            try:
                await self._look(nodes, waiting)
            except NoNodeAnswered:
                if look:
                    raise
                continue  # they may have started again, at other addresses
            await self._read_places(nodes, waiting)
            # A place that fails to answer may have been replaced by another in the record: look twice.
            again = [
                each
                for each, storage in zip(waiting, before, strict=True)
                if not each.done and (each.storage != storage or look == 0)
            ]
            for search in waiting:
                if not search.done and search not in again and search.silent:
                    raise search.unreachable()
            # The same record twice, and none of its places has the bytes: they are lost.
            waiting = again
            if not waiting:
                return
        raise waiting[0].unreachable()

    async def _look(self, nodes: Mapping[str, RemoteStore], searches: Iterable[_Search]) -> None:
        """Ask for the record of each, at its most likely place, which sends the bytes at once if it has
        them."""
        refusals = Refusals()
        waiting = list(searches)
        while waiting:
            plan: dict[str, list[_Search]] = {}
            for search in waiting:
                order = preference_order(search.request.key, nodes)
                node_id = next((each for each in order if each not in refusals.node_ids), None)
                if node_id is None:
                    raise search.unreachable() if search.lapsed else refusals.error()
                plan.setdefault(node_id, []).append(search)
            waiting = await self._receive_all(nodes, plan, refusals, storage=False)

    async def _read_places(self, nodes: Mapping[str, RemoteStore], searches: Iterable[_Search]) -> None:
        """Read each from one place of its record after the other."""
        waiting = list(searches)
        while waiting:
            plan: dict[str, list[_Search]] = {}
            for search in waiting:
                search.silent |= {each for each in search.places if each not in nodes}
                order = preference_order(search.request.key, search.places)
                untried = (each for each in order if each not in search.gone | search.silent)
                if not search.done and (node_id := next(untried, None)) is not None:
                    plan.setdefault(node_id, []).append(search)
            if not plan:
                return
            await self._receive_all(nodes, plan, Refusals(), storage=True)
            waiting = [search for some in plan.values() for search in some if not search.done]

    async def _receive_all(
        self,
        nodes: Mapping[str, RemoteStore],
        plan: Mapping[str, Sequence[_Search]],
        refusals: Refusals,
        *,
        storage: bool,
    ) -> list[_Search]:
        """Ask nodes for objects: for these bytes (``storage``), or for what their records name. Returns the
        searches of the nodes that cannot answer. None is being read any more when this raises."""
        asking = [self._receive(nodes[each], some, refusals, storage=storage) for each, some in plan.items()]
        if len(asking) == 1:
            return [*await asking[0]]
        tasks = [asyncio.ensure_future(each) for each in asking]
        try:
            left = await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait(*tasks)
        return [search for some in left for search in some]

    async def _receive(
        self, node: RemoteStore, searches: Sequence[_Search], refusals: Refusals, *, storage: bool
    ) -> Sequence[_Search]:
        wanted = [
            replace(search.request, storage=search.storage) if storage else search.request
            for search in searches
        ]
        try:
            answers = await receive(node, self._memory, self._tenant.owner, wanted)
        except (NodeUnavailable, RemoteError) as error:
            node.forget_peer()
            refusals.add(node.node_id, error)
        except (TransferError, SourceBusy) as error:
            log.info("nothing was read from %s: %s", node.node_id, error)
            for search in searches:
                search.lapsed = str(error) if isinstance(error, GrantLapsed) else search.lapsed
            node.forget_peer()
            refusals.silent.add(node.node_id)
        else:
            for search, answer in zip(searches, answers, strict=True):
                search.answered(answer, node.node_id, storage=storage)
            return ()
        for search in searches if storage else ():
            search.silent.add(node.node_id)
        return searches

    async def _search_last_known(self, searches: Sequence[_Search], stale: set[str]) -> None:
        """Without Redis: the latest of what the nodes that answer have."""
        nodes = await self._nodes.current(doubted=True)
        keys = [search.request.key for search in searches]
        records = await find(nodes, self._tenant.owner, keys, last_known=True)
        for search in searches:
            stale.add(search.request.name)
            search.done = (record := records.get(search.request.key)) is None
            if record is not None:
                search.storage, search.places = record.info.storage, tuple(record.places)
                search.gone, search.silent = set(), set()
        await self._read_places(nodes, searches)
        for search in searches:
            if not search.done and search.silent:
                raise search.unreachable()
