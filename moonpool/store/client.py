"""``moonpool.connect``: any array, tensor or buffer, kept by the cluster's store nodes under a name."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from kvstore import keys as block_keys
from kvstore.remote_store import RemoteStore
from moonpool.store.arrays import Receiver, register, type_of
from moonpool.store.directory import open_directory, rank
from moonpool.store.errors import ObjectMissing, PutFailed, UnknownNode
from moonpool.store.nodes import StoreNodes
from moonpool.store.receiving import Want, receive
from moonpool.store.sending import Outgoing, send
from moonpool.store.tenant import Tenant
from protos import store_pb2
from runtime.errors import NodeUnavailable, RemoteError
from runtime.options import TransferOptions
from transfer import TransferAgent, TransferError

log = logging.getLogger(__name__)

# One round of a batch: enough that the calls cost nothing beside the bytes, few enough that a round is done
# well within its deadline and its regions are far from as many as an agent can have.
_ROUND_OBJECTS = 512
_ROUND_NBYTES = 256 << 20

_UNREACHABLE = (NodeUnavailable, TransferError)
_numbers = itertools.count()

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """An object as a store node describes it. ``nodes``: who has a copy of this version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    version: int  # nanoseconds since 1970 at its put
    nodes: tuple[str, ...]


@asynccontextmanager
async def connect(
    url: str = "http://127.0.0.1:8000",
    *,
    tenant: str = "",
    salt: str = "",
    namespace: str = "moonpool",
    deadline_s: float = 30.0,
    transfer: TransferOptions | None = None,
) -> AsyncIterator[StoreClient]:
    """A client of the store nodes of a cluster, around the block.

    ``url``: the conductor's API (``http://HOST:PORT``), or the index's Redis (``redis://``, ``unix://``) with
    its ``namespace``. ``tenant`` and ``salt``: objects are found only by those who give the same two.
    ``deadline_s``: longest that one call or batch of transfers may take. ``transfer``: needed where the nodes
    have a ``transfer.secret``, or are on other machines.

    Raises:
        BadUrl: neither an API nor a Redis. Whether anybody answers there shows with the first call.
    """
    options = replace(transfer or TransferOptions(), deadline_s=deadline_s)
    name = f"client-{os.getpid()}-{next(_numbers)}"
    async with (
        open_directory(url, namespace) as directory,
        await TransferAgent.start(options, agent_id=name, epoch=time.time_ns()) as agent,
    ):
        nodes = StoreNodes(directory, agent, url, deadline_s=deadline_s, clock=time.monotonic)
        try:
            yield StoreClient(nodes, agent, Tenant(tenant, salt))
        finally:
            await nodes.close()


class StoreClient:
    """Made by ``connect``. Values are numpy arrays, tensors in host memory of any library that speaks DLPack,
    or buffers; they are moved from and to their own memory, without a copy here. One event loop.

    Every method raises ``NoStoreNodes``, ``ApiError`` or ``IndexUnavailable`` where there is nobody to ask.
    A node that does not answer is left out. The last put of a name counts.
    """

    def __init__(
        self,
        nodes: StoreNodes,
        agent: TransferAgent,
        tenant: Tenant,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.tenant = tenant
        self._nodes = nodes
        self._agent = agent
        self._now_ns = now_ns
        self._last_version = 0

    # ------------------------------------------------------------------ put

    async def put(self, name: str, value: Any, *, copies: int = 1, node: str = "") -> None:
        """Store ``value`` under ``name``, in place of what was there. ``copies``: on as many nodes. ``node``:
        the one that is to have the first copy, if it has room.

        Raises:
            BadObject: it cannot be stored.
            UnknownNode: there is no store node of that name.
            PutFailed: no node took it (then the old value is still there), or fewer than ``copies`` have it.
        """
        await self.batch_put({name: value}, copies=copies, node=node)

    async def batch_put(self, values: Mapping[str, Any], *, copies: int = 1, node: str = "") -> None:
        """``put`` of many: far cheaper than one by one. After an error some are stored and some are not."""
        for round_of in _rounds(list(values.items())):
            await self._put_round(round_of, copies, node)

    async def _put_round(self, values: Sequence[tuple[str, Any]], copies: int, preferred: str) -> None:
        nodes = await self._nodes.current(doubted=bool(preferred))
        if preferred and preferred not in nodes:
            raise UnknownNode(preferred, list(nodes))
        if copies > len(nodes):
            nodes = await self._nodes.current(doubted=True)
        batch: list[Outgoing] = []
        try:
            for name, value in values:
                batch.append(self._outgoing(name, value))
            first = await self._place(nodes, batch, preferred)
        finally:
            for outgoing in batch:
                if outgoing.region is not None:
                    outgoing.region.close()
        infos = [outgoing.info for outgoing in batch]
        await self._copy_all(nodes, infos, first, copies)
        await self._forget_older(nodes, infos)

    def _outgoing(self, name: str, value: Any) -> Outgoing:
        key = self.tenant.key(name)
        kind = type_of(value)
        self._last_version = max(self._last_version + 1, self._now_ns())
        info = store_pb2.ObjectInfo(
            key=key,
            version=self._last_version,
            name=name,
            nbytes=kind.nbytes,
            dtype=kind.dtype,
            shape=kind.shape,
        )
        region = register(self._agent, value, writable=False) if kind.nbytes else None
        return Outgoing(info, region)

    async def _place(
        self, nodes: Mapping[str, RemoteStore], batch: Sequence[Outgoing], preferred: str
    ) -> list[str]:
        """Store each object on the first node in its order that takes it; returns which. Raises
        ``PutFailed`` for the first that none takes, when the others are through."""
        orders = [iter(_order(each.info.key, nodes, preferred)) for each in batch]
        reasons: list[list[str]] = [[] for _ in batch]
        placed = [""] * len(batch)
        waiting = list(range(len(batch)))
        failed: list[int] = []
        while waiting:
            by_node: dict[str, list[int]] = {}
            for number in waiting:
                node_id = next(orders[number], None)
                if node_id is None:
                    failed.append(number)
                else:
                    by_node.setdefault(node_id, []).append(number)
            answers = await asyncio.gather(
                *(self._send(nodes[each], [batch[n] for n in numbers]) for each, numbers in by_node.items())
            )
            waiting = []
            for (node_id, numbers), answer in zip(by_node.items(), answers, strict=True):
                for number, reason in zip(numbers, answer, strict=True):
                    if reason:
                        reasons[number].append(reason)
                        waiting.append(number)
                    else:
                        placed[number] = node_id
        if failed:
            raise PutFailed(batch[failed[0]].info.name, "was not stored", reasons[failed[0]])
        return placed

    async def _send(self, node: RemoteStore, batch: Sequence[Outgoing]) -> list[str]:
        try:
            return await send(node, self.tenant.owner, batch)
        except (*_UNREACHABLE, RemoteError) as error:
            node.forget_peer()
            return [str(error)] * len(batch)

    async def _copy_all(
        self,
        nodes: Mapping[str, RemoteStore],
        infos: Sequence[store_pb2.ObjectInfo],
        first: Sequence[str],
        copies: int,
    ) -> None:
        if copies > 1:
            await asyncio.gather(
                *(
                    self._copy(nodes, info, [holder], copies, surplus=False)
                    for info, holder in zip(infos, first, strict=True)
                )
            )

    async def _copy(
        self,
        nodes: Mapping[str, RemoteStore],
        info: store_pb2.ObjectInfo,
        holders: Sequence[str],
        copies: int,
        *,
        surplus: bool,
    ) -> list[str]:
        """Have other nodes read it from the first holder until ``copies`` have it. Raises ``PutFailed``."""
        have, reasons = list(holders), []
        source = await nodes[have[0]].kv_address()
        request = store_pb2.CopyRequest(
            owner=self.tenant.owner, key=info.key, version=info.version, source=source, surplus=surplus
        )
        for node_id in rank(info.key, nodes.keys() - set(have)):
            if len(have) >= copies:
                break
            try:
                await nodes[node_id].call("Copy", request)
                have.append(node_id)
            except (NodeUnavailable, RemoteError) as error:
                reasons.append(str(error))
        if len(have) < copies:
            reasons.append(f"{len(nodes)} store nodes are ready")
            raise PutFailed(info.name, f"is on {len(have)} nodes, {copies} were asked for", reasons)
        return have

    async def _forget_older(
        self, nodes: Mapping[str, RemoteStore], infos: Sequence[store_pb2.ObjectInfo]
    ) -> None:
        """Earlier versions may be on any node; where one cannot be asked, it is offered there no more than
        until it is put again."""
        keys = block_keys.pack(info.key for info in infos)
        before = min(info.version for info in infos)
        request = store_pb2.RemoveRequest(owner=self.tenant.owner, keys=keys, before_version=before)
        await self._ask_all(nodes, "Remove", request)

    async def replicate(self, name: str, copies: int) -> tuple[str, ...]:
        """Have ``copies`` nodes keep a hot object. Copies beyond those asked for at its put go first where
        room is needed. Returns the nodes that have it.

        Raises ``ObjectMissing``, ``PutFailed``.
        """
        stat = await self.stat(name)
        if stat is None:
            raise ObjectMissing(name)
        nodes = await self._nodes.current(doubted=copies > len(stat.nodes))
        info = store_pb2.ObjectInfo(key=self.tenant.key(name), version=stat.version, name=name)
        return tuple(await self._copy(nodes, info, stat.nodes, copies, surplus=True))

    # ------------------------------------------------------------------ get

    async def get(self, name: str, *, required: bool = False) -> Array | None:
        """The object as a new array of its dtype and shape; None where there is none.

        Raises:
            ObjectMissing: there is none, and it is ``required``.
            BadObject: numpy has no such dtype: use ``get_into``.
        """
        return (await self.batch_get([name], required=required))[0]

    async def batch_get(self, names: Sequence[str], *, required: bool = False) -> list[Array | None]:
        """``get`` of many, in the order of ``names``: far cheaper than one by one."""
        wants = [Want(name, self.tenant.key(name)) for name in names]
        received = await self._receive(wants, required)
        return [None if each is None else each.array for each in received]

    async def get_into(self, name: str, out: Any, *, required: bool = False) -> bool:
        """Read the object into memory of the caller's, of as many bytes. False: there is none, and ``out`` is
        as it was, unless a damaged copy was found.

        Raises ``ObjectMissing`` as ``get``; ``BadObject``: ``out`` cannot take it.
        """
        return (await self.batch_get_into({name: out}, required=required))[0]

    async def batch_get_into(self, outs: Mapping[str, Any], *, required: bool = False) -> list[bool]:
        """``get_into`` of many, in the order of ``outs``."""
        wants = [Want(name, self.tenant.key(name), out) for name, out in outs.items()]
        return [each is not None for each in await self._receive(wants, required)]

    async def _receive(self, wants: Sequence[Want], required: bool) -> list[Receiver | None]:
        received: list[Receiver | None] = []
        for first in range(0, len(wants), _ROUND_OBJECTS):
            received += await self._receive_round(wants[first : first + _ROUND_OBJECTS], required)
        return received

    async def _receive_round(self, wants: Sequence[Want], required: bool) -> list[Receiver | None]:
        nodes = await self._nodes.current()
        received: list[Receiver | None] = [None] * len(wants)
        unreachable: set[str] = set()
        # First the node where each most likely is; then, for what was not there, those that say they have it.
        likely: dict[str, list[int]] = {}
        for number, want in enumerate(wants):
            likely.setdefault(rank(want.key, nodes)[0], []).append(number)
        missing = await self._receive_from(nodes, likely, wants, received, unreachable)
        tried: dict[int, set[str]] = {n: {rank(wants[n].key, nodes)[0]} for n in missing}
        while missing:
            nodes = await self._nodes.current(doubted=True)
            holders = await self._holders(nodes, [wants[number].key for number in missing], unreachable)
            elsewhere: dict[str, list[int]] = {}
            for number in missing:
                untried = [each for each in holders.get(wants[number].key, ()) if each not in tried[number]]
                if untried:
                    elsewhere.setdefault(untried[0], []).append(number)
                    tried[number].add(untried[0])
            if not elsewhere:
                break
            missing = await self._receive_from(nodes, elsewhere, wants, received, unreachable)
        absent = [want.name for want, each in zip(wants, received, strict=True) if each is None]
        if absent and required:
            raise ObjectMissing(absent[0], sorted(unreachable))
        if absent and unreachable:
            log.warning("%d objects were not found; %s did not answer", len(absent), sorted(unreachable))
        return received

    async def _receive_from(
        self,
        nodes: Mapping[str, RemoteStore],
        plan: Mapping[str, Sequence[int]],
        wants: Sequence[Want],
        received: list[Receiver | None],
        unreachable: set[str],
    ) -> list[int]:
        """Read what each node of ``plan`` has of the wants it names. Returns the wants it had not."""

        async def receive_from(node_id: str, numbers: Sequence[int]) -> list[Receiver | None]:
            try:
                return await receive(
                    nodes[node_id], self._agent, self.tenant.owner, [wants[number] for number in numbers]
                )
            except _UNREACHABLE as error:
                log.info("nothing was read from %s: %s", node_id, error)
                nodes[node_id].forget_peer()
                unreachable.add(node_id)
                return [None] * len(numbers)

        answers = await asyncio.gather(*(receive_from(*entry) for entry in plan.items()))
        missing: list[int] = []
        for numbers, answer in zip(plan.values(), answers, strict=True):
            for number, each in zip(numbers, answer, strict=True):
                received[number] = each
                if each is None:
                    missing.append(number)
        return missing

    async def _holders(
        self, nodes: Mapping[str, RemoteStore], keys: Sequence[bytes], unreachable: set[str]
    ) -> dict[bytes, list[str]]:
        """Which nodes have the latest version of each, in the order in which they are tried."""
        found: dict[bytes, dict[str, int]] = {}
        request = store_pb2.FindRequest(owner=self.tenant.owner, keys=block_keys.pack(keys))
        for node_id, reply in (await self._ask_all(nodes, "Find", request, unreachable)).items():
            for info in reply.found:
                found.setdefault(info.key, {})[node_id] = info.version
        return {
            key: rank(key, [n for n, version in versions.items() if version == max(versions.values())])
            for key, versions in found.items()
        }

    # ------------------------------------------------------------------ what is there

    async def exists(self, name: str) -> bool:
        """Whether some node has it. Keeps nothing from being evicted, and counts as no use."""
        return (await self.batch_exists([name]))[0]

    async def batch_exists(self, names: Sequence[str]) -> list[bool]:
        found = await self._stats([self.tenant.key(name) for name in names])
        return [self.tenant.key(name) in found for name in names]

    async def stat(self, name: str) -> ObjectStat | None:
        """What is stored under a name, without reading it; None: nothing."""
        key = self.tenant.key(name)
        return (await self._stats([key])).get(key)

    async def _stats(self, keys: Sequence[bytes]) -> dict[bytes, ObjectStat]:
        nodes = await self._nodes.current()
        request = store_pb2.FindRequest(owner=self.tenant.owner, keys=block_keys.pack(keys))
        replies = await self._ask_all(nodes, "Find", request)
        return _latest((node_id, info) for node_id, reply in replies.items() for info in reply.found)

    async def ls(self, prefix: str = "") -> list[ObjectStat]:
        """This tenant's objects whose names begin with ``prefix``, by name."""
        nodes = await self._nodes.current(doubted=True)

        async def list_node(node_id: str) -> list[tuple[str, store_pb2.ObjectInfo]]:
            found: list[tuple[str, store_pb2.ObjectInfo]] = []
            after = b""
            while True:
                request = store_pb2.ListRequest(owner=self.tenant.owner, after=after)
                page = (await self._ask_all({node_id: nodes[node_id]}, "List", request)).get(node_id)
                if page is None or not page.objects:
                    return found
                found += [(node_id, info) for info in page.objects]
                after = page.objects[-1].key

        listed = await asyncio.gather(*map(list_node, nodes))
        stats = _latest(pair for pairs in listed for pair in pairs)
        return sorted((s for s in stats.values() if s.name.startswith(prefix)), key=lambda s: s.name)

    # ------------------------------------------------------------------ remove

    async def remove(self, name: str) -> bool:
        """Drop every copy. False: there was none. Who reads one now reads it to the end."""
        return await self.batch_remove([name]) > 0

    async def batch_remove(self, names: Sequence[str]) -> int:
        """Returns how many of the objects were there."""
        keys = [self.tenant.key(name) for name in names]
        found = await self._stats(keys)
        nodes = await self._nodes.current()
        request = store_pb2.RemoveRequest(owner=self.tenant.owner, keys=block_keys.pack(keys))
        await self._ask_all(nodes, "Remove", request)
        return len(found)

    # ------------------------------------------------------------------ the nodes

    async def nodes(self) -> Mapping[str, RemoteStore]:
        """The store nodes that are ready, by id."""
        return await self._nodes.current(doubted=True)

    async def usage(self) -> dict[str, store_pb2.UsageReply]:
        """What each node keeps, by its id."""
        request = store_pb2.UsageRequest(owner=self.tenant.owner)
        return await self._ask_all(await self.nodes(), "Usage", request)

    async def _ask_all(
        self,
        nodes: Mapping[str, RemoteStore],
        method: str,
        request: Any,
        unreachable: set[str] | None = None,
    ) -> dict[str, Any]:
        """The answers by node; without those that did not answer, and those that keep no objects."""

        async def ask(node_id: str) -> Any:
            try:
                return await nodes[node_id].call(method, request)
            except NodeUnavailable as error:
                log.warning("%s", error)
                if unreachable is not None:
                    unreachable.add(node_id)
            except RemoteError as error:
                if error.kind != "ObjectsOff":
                    raise
            return None

        answers = await asyncio.gather(*map(ask, nodes))
        return {node_id: each for node_id, each in zip(nodes, answers, strict=True) if each is not None}


def _order(key: bytes, nodes: Iterable[str], preferred: str) -> list[str]:
    order = rank(key, nodes)
    return [preferred, *(each for each in order if each != preferred)] if preferred else order


def _rounds(values: Sequence[tuple[str, Any]]) -> Iterable[list[tuple[str, Any]]]:
    """Runs of values that are moved together."""
    batch: list[tuple[str, Any]] = []
    nbytes = 0
    for name, value in values:
        size = type_of(value).nbytes
        if batch and (len(batch) == _ROUND_OBJECTS or nbytes + size > _ROUND_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append((name, value))
        nbytes += size
    if batch:
        yield batch


def _latest(found: Iterable[tuple[str, store_pb2.ObjectInfo]]) -> dict[bytes, ObjectStat]:
    """One entry for each key: its latest version, and who has that."""
    by_key: dict[bytes, list[tuple[str, store_pb2.ObjectInfo]]] = {}
    for node_id, info in found:
        by_key.setdefault(info.key, []).append((node_id, info))
    stats: dict[bytes, ObjectStat] = {}
    for key, copies in by_key.items():
        version = max(info.version for _, info in copies)
        latest = [(node_id, info) for node_id, info in copies if info.version == version]
        info = latest[0][1]
        holders = tuple(sorted(node_id for node_id, _ in latest))
        stats[key] = ObjectStat(info.name, info.dtype, tuple(info.shape), info.nbytes, version, holders)
    return stats
