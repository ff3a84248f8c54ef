"""Arrays, tensors and buffers stored by name on the cluster's store nodes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.client.connections import Directory, StoreNodes
from moonpool.kvstore.client.download import GetRequest
from moonpool.kvstore.client.errors import ObjectMissing
from moonpool.kvstore.client.getter import Getter
from moonpool.kvstore.client.memory import LocalMemory
from moonpool.kvstore.client.putter import Putter
from moonpool.kvstore.client.queries import ObjectStat, find_all, list_all, query_all
from moonpool.kvstore.client.tenant import Tenant
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import TransferAgent

_numbers = itertools.count()

Array = npt.NDArray[Any]


@asynccontextmanager
async def open_client(
    directory: Directory, where: str, *, tenant: Tenant, deadline_s: float, transfer: TransferOptions
) -> AsyncIterator[StoreClient]:
    """A client of the nodes in ``directory``. ``where``: the cluster's name in messages. See
    ``moonpool.connect``."""
    options = replace(transfer, deadline_s=deadline_s)
    name = f"client-{os.getpid()}-{next(_numbers)}"
    async with await TransferAgent.start(options, agent_id=name, epoch=time.time_ns()) as agent:
        nodes = StoreNodes(directory, agent, where, deadline_s=deadline_s, clock=time.monotonic)
        try:
            yield StoreClient(nodes, agent, tenant)
        finally:
            await nodes.close()


class StoreClient:
    """Made by ``open_client``. Values are numpy arrays, tensors in host memory of any library with DLPack, or
    buffers; they are moved without a copy. One event loop.

    Every method raises ``NoStoreNodes``, ``NoNodeAnswered``, ``ApiError``, ``IndexUnavailable``. A node that
    does not answer is skipped where others do. The last put of a name counts.
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

    async def put(self, name: str, value: Any, *, copies: int = 1, node: str = "") -> None:
        """Store ``value`` under ``name`` and replace the former value, on ``copies`` nodes. ``node``: the
        preferred node of the first copy.

        Raises ``BadObject``: it cannot be stored; ``UnknownNode``: there is no such node; ``PutFailed``: no
        node accepted it (the old value is still there), or fewer than ``copies`` have it.
        """
        await self.batch_put({name: value}, copies=copies, node=node)

    async def batch_put(self, values: Mapping[str, Any], *, copies: int = 1, node: str = "") -> None:
        """``put`` of many: much cheaper than one by one. After an error some are stored and some are not."""
        await self._putter.put(list(values.items()), copies, node)

    async def replicate(self, name: str, copies: int) -> tuple[str, ...]:
        """Make ``copies`` nodes keep a hot object. Unused surplus copies are dropped first when room is
        needed. Returns the nodes that have it. Raises ``ObjectMissing``, ``PutFailed``."""
        stat = await self.stat_existing(name)
        nodes = await self._nodes.current(doubted=copies > len(stat.nodes))
        info = store_pb2.ObjectInfo(key=self.tenant.key(name), version=stat.version, name=name)
        return tuple(await self._putter.copy(nodes, info, stat.nodes, copies, surplus=True))

    # ------------------------------------------------------------------ get

    async def get(self, name: str, *, required: bool = False) -> Array | None:
        """Return the object as a new array of its dtype and shape; None: there is none.

        Raises ``ObjectMissing``: there is none, and it is ``required``; ``BadObject``: numpy has no such
        dtype, use ``get_into``.
        """
        return (await self.batch_get([name], required=required))[0]

    async def batch_get(self, names: Sequence[str], *, required: bool = False) -> list[Array | None]:
        """``get`` of many, in the order of ``names``: much cheaper than one by one. The arrays share memory,
        which is freed with the last of them."""
        requests = [GetRequest(name, self.tenant.key(name)) for name in names]
        return await self._getter.get(requests, required)

    async def get_into(self, name: str, out: Any, *, required: bool = False) -> bool:
        """Read the object into the caller's memory of equal size. False: there is none, and ``out`` is
        unchanged unless a damaged copy was found.

        Raises ``ObjectMissing`` as ``get``; ``BadObject``: it does not fit ``out``.
        """
        return (await self.batch_get_into({name: out}, required=required))[0]

    async def batch_get_into(self, outs: Mapping[str, Any], *, required: bool = False) -> list[bool]:
        """``get_into`` of many, in the order of ``outs``."""
        requests = [GetRequest(name, self.tenant.key(name), out) for name, out in outs.items()]
        return [each is not None for each in await self._getter.get(requests, required)]

    # ------------------------------------------------------------------ queries

    async def exists(self, name: str) -> bool:
        """Whether some node has it. Neither pins nor counts as a use."""
        return (await self.batch_exists([name]))[0]

    async def batch_exists(self, names: Sequence[str]) -> list[bool]:
        found = await self._stats([self.tenant.key(name) for name in names])
        return [self.tenant.key(name) in found for name in names]

    async def stat(self, name: str) -> ObjectStat | None:
        """Describe an object without reading it; None: there is none."""
        key = self.tenant.key(name)
        return (await self._stats([key])).get(key)

    async def stat_existing(self, name: str) -> ObjectStat:
        """``stat`` of an object that must exist. Raises ``ObjectMissing``, with the nodes that did not
        answer."""
        key = self.tenant.key(name)
        unreachable: set[str] = set()
        found = (await self._stats([key], unreachable)).get(key)
        if found is None:
            raise ObjectMissing(name, sorted(unreachable))
        return found

    async def _stats(
        self, keys: Sequence[bytes], unreachable: set[str] | None = None
    ) -> dict[bytes, ObjectStat]:
        return await find_all(await self._nodes.current(), self.tenant.owner, keys, unreachable)

    async def ls(self, prefix: str = "") -> list[ObjectStat]:
        """This tenant's objects with names that begin with ``prefix``, by name."""
        stats = await list_all(await self.nodes(), self.tenant.owner)
        return sorted((s for s in stats.values() if s.name.startswith(prefix)), key=lambda s: s.name)

    # ------------------------------------------------------------------ remove

    async def remove(self, name: str) -> bool:
        """Drop every copy. False: there was none. Current readers are not affected."""
        return await self.batch_remove([name]) > 0

    async def batch_remove(self, names: Sequence[str]) -> int:
        """Returns how many of the objects existed."""
        keys = [self.tenant.key(name) for name in names]
        found = await self._stats(keys)
        nodes = await self._nodes.current()
        request = store_pb2.RemoveRequest(owner=self.tenant.owner, keys=block_keys.pack(keys))
        await query_all(nodes, "Remove", request)
        return len(found)

    # ------------------------------------------------------------------ the nodes

    async def nodes(self) -> Mapping[str, RemoteStore]:
        return await self._nodes.current(doubted=True)

    async def usage(self) -> dict[str, store_pb2.UsageReply]:
        request = store_pb2.UsageRequest(owner=self.tenant.owner)
        return await query_all(await self.nodes(), "Usage", request)
