"""Arrays, tensors and buffers stored by name on the cluster's store nodes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from moonpool.kvstore.client.connections import Directory, StoreNodes, preference_order
from moonpool.kvstore.client.download import Array, GetRequest
from moonpool.kvstore.client.errors import (
    BadObject,
    NoNodeAnswered,
    NoRecords,
    ObjectMissing,
    OutcomeUnknown,
    PutFailed,
)
from moonpool.kvstore.client.getter import Getter
from moonpool.kvstore.client.memory import LocalMemory
from moonpool.kvstore.client.putter import PutOptions, Putter
from moonpool.kvstore.client.queries import (
    ObjectStat,
    Refusals,
    ask_any,
    find,
    find_whether,
    list_objects,
    query_all,
)
from moonpool.kvstore.client.tenant import Tenant
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.errors import RemoteError
from moonpool.transfer import TransferAgent

_numbers = itertools.count()

T = TypeVar("T")

_PINS = {"": store_pb2.NONE, "soft": store_pb2.SOFT, "hard": store_pb2.HARD}
# A hundred years: what is longer is a mistake.
_LONGEST_TTL_S = 100 * 366 * 86_400.0
# Objects of one question or removal.
_REMOVED_AT_ONCE = 1000


@asynccontextmanager
async def open_client(
    directory: Directory, where: str, *, tenant: Tenant, deadline_s: float, transfer: TransferOptions
) -> AsyncIterator[StoreClient]:
    """A client of the nodes in ``directory``. ``where``: the cluster's name in messages. See
    ``moonpool.connect``."""
    options = replace(transfer, deadline_s=deadline_s)
    name = f"client-{os.getpid()}-{next(_numbers)}"
    async with await TransferAgent.start(options, agent_id=name, epoch=time.time_ns()) as agent:
        nodes = StoreNodes(directory, agent, where, deadline_s=deadline_s)
        try:
            yield StoreClient(nodes, agent, tenant)
        finally:
            await nodes.close()


class StoreClient:
    """Made by ``open_client``. Values are numpy arrays, tensors in host memory of any library with DLPack, or
    buffers; those of more than 64 KiB are moved without a copy. One event loop.

    Puts, gets and removes of a name are linearizable while Redis lives: each takes effect at one moment
    between its call and its return. After ``OutcomeUnknown`` a change may still be made.

    Without Redis every method raises ``NoRecords``, and nothing changes. Reads given a set as ``stale`` do
    not: they answer what the nodes last knew, which may be replaced or removed, and add the names to the set.

    Every method raises ``NoStoreNodes``, ``NoNodeAnswered``, ``ApiError``, ``IndexUnavailable``. A node that
    does not answer is skipped where others do.
    """

    def __init__(self, nodes: StoreNodes, agent: TransferAgent, tenant: Tenant) -> None:
        self.tenant = tenant
        self._memory = LocalMemory(agent)
        self._putter = Putter(nodes, self._memory, tenant)
        self._getter = Getter(nodes, self._memory, tenant)
        self._nodes = nodes

    def registered(self, buffer: Any) -> AbstractContextManager[None]:
        """``with store.registered(buffer)``: register memory once for many calls; puts and gets of its parts
        cost less."""
        return self._memory.registered(buffer)

    # ------------------------------------------------------------------ put

    async def put(
        self,
        name: str,
        value: Any,
        *,
        copies: int = 1,
        node: str = "",
        ttl_s: float | None = None,
        pin: str = "",
    ) -> None:
        """Store ``value`` under ``name`` and replace the former value, on ``copies`` different hosts.
        ``node``: the preferred node of the first copy. ``ttl_s``: it is removed after this time; None: never.
        ``pin``: "hard": never evicted; "soft": evicted after what is not pinned.

        Raises ``BadObject``: it cannot be stored; ``UnknownNode``: there is no such node; ``PutFailed``: too
        few hosts accepted it; ``OutcomeUnknown``. The old value is still there, except after
        ``OutcomeUnknown``.
        """
        await self.batch_put({name: value}, copies=copies, node=node, ttl_s=ttl_s, pin=pin)

    async def batch_put(
        self,
        values: Mapping[str, Any],
        *,
        copies: int = 1,
        node: str = "",
        ttl_s: float | None = None,
        pin: str = "",
    ) -> None:
        """``put`` of many: much cheaper than one by one. After an error some are stored and some are not."""
        if pin not in _PINS:
            raise BadObject(f"pin must be one of {', '.join(map(repr, _PINS))}, not {pin!r}")
        if ttl_s is not None and not 0 < ttl_s < _LONGEST_TTL_S:
            raise BadObject(f"ttl_s must be above 0 and below {_LONGEST_TTL_S:g} seconds, not {ttl_s!r}")
        await self._putter.put(list(values.items()), PutOptions(copies, node, ttl_s, _PINS[pin]))

    async def replicate(self, name: str, copies: int) -> tuple[str, ...]:
        """Make ``copies`` nodes keep a hot object. Unused surplus copies are dropped first when room is
        needed. Returns the nodes that have it. Raises ``ObjectMissing``, ``PutFailed``."""
        nodes = await self.nodes()
        key = self.tenant.key(name)
        record = (await self._find([key])).get(key)
        if record is None:
            raise ObjectMissing(name)
        have, reasons = [each for each in record.places if each in nodes], list[str]()
        for node_id in preference_order(key, nodes):
            if have and len(have) < copies and node_id not in record.places:
                await self._putter.copy(nodes, record.info, have, node_id, reasons, surplus=True)
        if len(have) < copies:
            reasons.append(f"{len(nodes)} store nodes are ready")
            raise PutFailed(name, f"is on {len(have)} nodes, {copies} were requested", reasons)
        return tuple(have)

    # ------------------------------------------------------------------ get

    async def get(self, name: str, *, required: bool = False, stale: set[str] | None = None) -> Array | None:
        """Return the object as a new array of its dtype and shape; None: there is none.

        Raises ``ObjectMissing``: there is none, and it is ``required``; ``ObjectUnreachable``: no node that
        has it answers; ``BadObject``: numpy has no such dtype, use ``get_into``.
        """
        return (await self.batch_get([name], required=required, stale=stale))[0]

    async def batch_get(
        self, names: Sequence[str], *, required: bool = False, stale: set[str] | None = None
    ) -> list[Array | None]:
        """``get`` of many, in the order of ``names``: much cheaper than one by one. The arrays share memory,
        which is freed with the last of them."""
        requests = [GetRequest(name, self.tenant.key(name)) for name in names]
        return await self._getter.get(requests, required, stale)

    async def get_into(
        self, name: str, out: Any, *, required: bool = False, stale: set[str] | None = None
    ) -> bool:
        """Read the object into the caller's memory of equal size. False: there is none, and ``out`` is
        unchanged unless a damaged copy was found.

        Raises as ``get``; ``BadObject``: it does not fit ``out``.
        """
        return (await self.batch_get_into({name: out}, required=required, stale=stale))[0]

    async def batch_get_into(
        self, outs: Mapping[str, Any], *, required: bool = False, stale: set[str] | None = None
    ) -> list[bool]:
        """``get_into`` of many, in the order of ``outs``."""
        requests = [GetRequest(name, self.tenant.key(name), out) for name, out in outs.items()]
        return [each is not None for each in await self._getter.get(requests, required, stale)]

    # ------------------------------------------------------------------ queries

    async def exists(self, name: str) -> bool:
        """Whether there is such an object. Neither pins nor counts as a use."""
        return (await self.batch_exists([name]))[0]

    async def batch_exists(self, names: Sequence[str]) -> list[bool]:
        keys = [self.tenant.key(name) for name in names]
        return await self._asked(lambda nodes: find_whether(nodes, self.tenant.owner, keys))

    async def batch_readable(self, names: Sequence[str]) -> list[bool]:
        """``batch_exists`` of objects with a copy on a node that is in the index: a copy on a node that is
        gone returns with the node, or never."""
        keys = [self.tenant.key(name) for name in names]
        found, nodes = await self._find(keys), await self._nodes.current()
        return [key in found and not nodes.keys().isdisjoint(found[key].places) for key in keys]

    async def stat(self, name: str, *, stale: set[str] | None = None) -> ObjectStat | None:
        """Describe an object without reading it; None: there is none."""
        key = self.tenant.key(name)
        try:
            found = await self._find([key])
        except (NoRecords, NoNodeAnswered):
            if stale is None:
                raise
            stale.add(name)
            found = await find(await self._nodes.current(), self.tenant.owner, [key], last_known=True)
        return ObjectStat.of(found[key]) if key in found else None

    async def stat_existing(self, name: str, *, stale: set[str] | None = None) -> ObjectStat:
        """``stat`` of an object that must exist. Raises ``ObjectMissing``."""
        found = await self.stat(name, stale=stale)
        if found is None:
            raise ObjectMissing(name)
        return found

    async def _find(self, keys: Sequence[bytes]) -> dict[bytes, store_pb2.ObjectRecord]:
        return await self._asked(lambda nodes: find(nodes, self.tenant.owner, keys))

    async def _asked(self, ask: Callable[[Mapping[str, RemoteStore]], Awaitable[T]]) -> T:
        try:
            return await ask(await self._nodes.current())
        except NoNodeAnswered:
            # They may have started again, at other addresses.
            return await ask(await self._nodes.current(doubted=True))

    async def ls(self, prefix: str = "", *, stale: set[str] | None = None) -> list[ObjectStat]:
        """This tenant's objects with names that begin with ``prefix``, by name."""
        nodes = await self.nodes()
        try:
            found = await list_objects(nodes, self.tenant.owner)
        except (NoRecords, NoNodeAnswered):
            if stale is None:
                raise
            found = await list_objects(nodes, self.tenant.owner, last_known=True)
            stale |= {record.info.name for record in found.values()}
        stats = (ObjectStat.of(record) for record in found.values())
        return sorted((s for s in stats if s.name.startswith(prefix)), key=lambda s: s.name)

    # ------------------------------------------------------------------ remove

    async def remove(self, name: str) -> bool:
        """Remove an object. False: there was none. Current readers are not affected. Raises
        ``OutcomeUnknown``."""
        return await self.batch_remove([name]) > 0

    async def batch_remove(self, names: Sequence[str]) -> int:
        """Returns how many of the objects existed. After an error some are removed and some are not."""
        starts = range(0, len(names), _REMOVED_AT_ONCE)
        return sum([await self._remove(names[at : at + _REMOVED_AT_ONCE]) for at in starts])

    async def _remove(self, names: Sequence[str]) -> int:
        found = await self._find([self.tenant.key(name) for name in names])
        # Removed by their storage: a repetition cannot remove what was put meanwhile.
        left = {key: record.info.storage for key, record in found.items()}
        num_removed = 0
        while left:
            objects = [store_pb2.OpenObject(key=key, storage=storage) for key, storage in left.items()]
            request = store_pb2.RemoveRequest(owner=self.tenant.owner, objects=objects)
            nodes, refusals = await self._nodes.current(), Refusals()
            try:
                reply: store_pb2.RemoveReply = await ask_any(
                    nodes, objects[0].key, "Remove", request, refusals
                )
            except (NoRecords, NoNodeAnswered, RemoteError) as error:
                if refusals.silent or isinstance(error, RemoteError):
                    raise OutcomeUnknown(f"{len(objects)} objects were removed", str(error)) from error
                raise
            if refusals.silent and not all(reply.removed):
                # Gone: by a node that did not answer, or by others.
                reason = f"{', '.join(refusals.silent)} did not answer"
                raise OutcomeUnknown(f"{len(objects)} objects were removed", reason)
            num_removed += sum(reply.removed)
            # Those replaced since they were looked up are still there.
            now = zip(left, reply.removed, reply.storage, strict=True)
            left = {key: storage for key, removed, storage in now if not removed and storage}
        return num_removed

    # ------------------------------------------------------------------ the nodes

    async def nodes(self) -> Mapping[str, RemoteStore]:
        return await self._nodes.current(doubted=True)

    async def usage(self) -> dict[str, store_pb2.UsageReply]:
        request = store_pb2.UsageRequest(owner=self.tenant.owner)
        return await query_all(await self.nodes(), "Usage", request)
