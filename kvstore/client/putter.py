"""Puts of objects: the nodes that store them, the copies, and the removal of earlier versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.client.arrays import type_of
from moonpool.kvstore.client.connections import StoreNodes, preference_order
from moonpool.kvstore.client.errors import PutFailed, UnknownNode
from moonpool.kvstore.client.memory import LocalMemory
from moonpool.kvstore.client.queries import query_all
from moonpool.kvstore.client.tenant import Tenant
from moonpool.kvstore.client.upload import Upload, send
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.runtime.errors import NodeUnavailable, RemoteError
from moonpool.transfer import TransferError

# One round of a batch: enough to amortise the calls, few enough to end well within the deadline and with far
# fewer regions than an agent can have.
ROUND_OBJECTS = 512
_ROUND_NBYTES = 256 << 20


class Putter:
    def __init__(
        self,
        nodes: StoreNodes,
        memory: LocalMemory,
        tenant: Tenant,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._nodes = nodes
        self._memory = memory
        self._tenant = tenant
        self._now_ns = now_ns
        self._last_version = 0

    async def put(self, values: Sequence[tuple[str, Any]], copies: int, preferred: str) -> None:
        for round_of in _rounds(values):
            await self._put_round(round_of, copies, preferred)

    async def _put_round(self, values: Sequence[tuple[str, Any]], copies: int, preferred: str) -> None:
        nodes = await self._nodes.current(doubted=bool(preferred))
        if preferred and preferred not in nodes:
            raise UnknownNode(preferred, list(nodes))
        if copies > len(nodes):
            nodes = await self._nodes.current(doubted=True)
        batch: list[Upload] = []
        try:
            for name, value in values:
                batch.append(self._upload(name, value))
            first = await self._place(nodes, batch, preferred)
        finally:
            for upload in batch:
                if upload.buffer is not None:
                    upload.buffer.close()
        infos = [upload.info for upload in batch]
        if copies > 1:
            pairs = zip(infos, first, strict=True)
            calls = (self.copy(nodes, info, [holder], copies, surplus=False) for info, holder in pairs)
            await asyncio.gather(*calls)
        await self._forget_older(nodes, infos)

    def _upload(self, name: str, value: Any) -> Upload:
        key = self._tenant.key(name)
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
        return Upload(info, self._memory.borrow(value, writable=False) if kind.nbytes else None)

    async def _place(
        self, nodes: Mapping[str, RemoteStore], batch: Sequence[Upload], preferred: str
    ) -> list[str]:
        """Store each object on the first node in its order that accepts it; returns which. Raises
        ``PutFailed`` for the first that no node accepts, after the others are stored."""
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

    async def _send(self, node: RemoteStore, batch: Sequence[Upload]) -> list[str]:
        try:
            return await send(node, self._tenant.owner, batch)
        except (NodeUnavailable, RemoteError, TransferError) as error:
            node.forget_peer()
            return [str(error)] * len(batch)

    async def copy(
        self,
        nodes: Mapping[str, RemoteStore],
        info: store_pb2.ObjectInfo,
        holders: Sequence[str],
        copies: int,
        *,
        surplus: bool,
    ) -> list[str]:
        """Make other nodes read it from the first holder until ``copies`` have it. Raises ``PutFailed``."""
        have, reasons = list(holders), []
        source = await nodes[have[0]].kv_address()
        request = store_pb2.CopyRequest(
            owner=self._tenant.owner, key=info.key, version=info.version, source=source, surplus=surplus
        )
        for node_id in (each for each in _order(info.key, nodes) if each not in have):
            if len(have) >= copies:
                break
            try:
                await nodes[node_id].call("Copy", request)
                have.append(node_id)
            except (NodeUnavailable, RemoteError) as error:
                reasons.append(str(error))
        if len(have) < copies:
            reasons.append(f"{len(nodes)} store nodes are ready")
            raise PutFailed(info.name, f"is on {len(have)} nodes, {copies} were requested", reasons)
        return have

    async def _forget_older(
        self, nodes: Mapping[str, RemoteStore], infos: Sequence[store_pb2.ObjectInfo]
    ) -> None:
        """Remove earlier versions from every node. A node that does not answer keeps its version until the
        next put."""
        keys = block_keys.pack(info.key for info in infos)
        before = min(info.version for info in infos)
        request = store_pb2.RemoveRequest(owner=self._tenant.owner, keys=keys, before_version=before)
        await query_all(nodes, "Remove", request)


def _order(key: bytes, nodes: Mapping[str, RemoteStore], preferred: str = "") -> list[str]:
    # Stable: the object's own order among healthy nodes and among the others.
    order = sorted(preference_order(key, nodes), key=lambda node_id: not nodes[node_id].healthy)
    return [preferred, *(each for each in order if each != preferred)] if preferred else order


def _rounds(values: Sequence[tuple[str, Any]]) -> Iterable[list[tuple[str, Any]]]:
    batch: list[tuple[str, Any]] = []
    nbytes = 0
    for name, value in values:
        size = type_of(value).nbytes
        if batch and (len(batch) == ROUND_OBJECTS or nbytes + size > _ROUND_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append((name, value))
        nbytes += size
    if batch:
        yield batch
