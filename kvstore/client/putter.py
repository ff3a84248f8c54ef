"""Puts of objects: the bytes to enough nodes first, then one change of the record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Any

from moonpool.kvstore.client.arrays import type_of
from moonpool.kvstore.client.connections import StoreNodes, preference_order
from moonpool.kvstore.client.errors import NoRecords, OutcomeUnknown, PutFailed, UnknownNode
from moonpool.kvstore.client.memory import LocalMemory
from moonpool.kvstore.client.tenant import Tenant
from moonpool.kvstore.client.upload import Upload, send
from moonpool.kvstore.errors import raise_one
from moonpool.kvstore.objects.chunks import SMALL_NBYTES
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.runtime.errors import NodeUnavailable, RemoteError
from moonpool.runtime.service.vital import cancel_and_wait
from moonpool.transfer import TransferError

log = logging.getLogger(__name__)

# One round of a batch: enough to amortise the calls, few enough to end well within the deadline and with far
# fewer regions than an agent can have.
ROUND_OBJECTS = 512
_ROUND_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PutOptions:
    """``node``: preferred for the first copy; empty: any. ``ttl_s``: None: it does not expire."""

    copies: int = 1
    node: str = ""
    ttl_s: float | None = None
    pin: store_pb2.Pin.ValueType = store_pb2.NONE


class Putter:
    def __init__(self, nodes: StoreNodes, memory: LocalMemory, tenant: Tenant) -> None:
        self._nodes = nodes
        self._memory = memory
        self._tenant = tenant
        self._random = SystemRandom()

    async def put(self, values: Sequence[tuple[str, Any]], options: PutOptions) -> None:
        for round_of in _rounds(values):
            await self._put_round(round_of, options)

    async def _put_round(self, values: Sequence[tuple[str, Any]], options: PutOptions) -> None:
        nodes = await self._nodes.current(doubted=bool(options.node))
        if options.node and options.node not in nodes:
            raise UnknownNode(options.node, list(nodes))
        if options.copies > len(_hosts(nodes)):
            nodes = await self._nodes.current(doubted=True)
            _check_hosts(values[0][0], nodes, options.copies)
        batch: list[Upload] = []
        try:
            for name, value in values:
                batch.append(self._upload(name, value))
            first = await self._place(nodes, batch, options.node)
        finally:
            for upload in batch:
                if upload.buffer is not None:
                    upload.buffer.close()
        infos = [upload.info for upload in batch]
        places = [[holder] for holder in first]
        if options.copies > 1:
            await self._copy_all(nodes, infos, places, options.copies)
        await self._publish(nodes, infos, places, options)

    def _upload(self, name: str, value: Any) -> Upload:
        kind = type_of(value)
        info = store_pb2.ObjectInfo(
            key=self._tenant.key(name),
            storage=self._random.getrandbits(63) | 1,
            name=name,
            nbytes=kind.nbytes,
            dtype=kind.dtype,
            shape=kind.shape,
        )
        if kind.nbytes > SMALL_NBYTES:
            return Upload(info, self._memory.borrow(value, writable=False))
        data = self._memory.bytes_of(value, writable=False).tobytes() if kind.nbytes else b""
        return Upload(info, None, data)

    async def _place(
        self, nodes: Mapping[str, RemoteStore], batch: Sequence[Upload], preferred: str
    ) -> list[str]:
        """Write each object to the first node in its order that accepts it; returns which.

        Raises ``NoRecords``; ``PutFailed``: for the first that no node accepts. None is being written any
        more when this raises, or after a cancellation.
        """
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
            sends = [
                asyncio.ensure_future(self._send(nodes[each], [batch[n] for n in numbers]))
                for each, numbers in by_node.items()
            ]
            try:
                answers = await asyncio.gather(*sends)
            finally:
                await cancel_and_wait(*sends)  # they read the buffers of the batch
            waiting = []
            for (node_id, numbers), answer in zip(by_node.items(), answers, strict=True):
                for number, reason in zip(numbers, answer, strict=True):
                    if reason:
                        reasons[number].append(reason)
                        waiting.append(number)
                    else:
                        placed[number] = node_id
        if failed:
            await self._discard(nodes, [each.info for each in batch], [[each] for each in placed if each])
            raise PutFailed(batch[failed[0]].info.name, "was not stored", reasons[failed[0]])
        return placed

    async def _send(self, node: RemoteStore, batch: Sequence[Upload]) -> list[str]:
        try:
            return await send(node, self._tenant.owner, batch)
        except (NodeUnavailable, RemoteError, TransferError) as error:
            if isinstance(error, RemoteError) and error.kind == "RecordsLost":
                raise NoRecords(error.details) from error
            node.forget_peer()
            return [str(error)] * len(batch)

    async def _copy_all(
        self,
        nodes: Mapping[str, RemoteStore],
        infos: Sequence[store_pb2.ObjectInfo],
        places: Sequence[list[str]],
        copies: int,
    ) -> None:
        """Make other nodes read each object until ``copies`` hosts have it; ``places`` grow. Raises
        ``PutFailed``; nothing is stored then."""

        async def copy(info: store_pb2.ObjectInfo, have: list[str]) -> None:
            hosts = {nodes[each].host_id for each in have}
            others = [each for each in nodes if nodes[each].host_id not in hosts]
            reasons: list[str] = []
            for node_id in _order(info.key, {each: nodes[each] for each in others}):
                if len(have) >= copies:
                    return
                if nodes[node_id].host_id not in hosts and await self.copy(
                    nodes, info, have, node_id, reasons
                ):
                    hosts.add(nodes[node_id].host_id)
            if len(have) < copies:
                reasons.append(_hosts_in_words(nodes))
                raise PutFailed(info.name, f"is on {len(have)} hosts, {copies} were requested", reasons)

        outcomes = await asyncio.gather(*map(copy, infos, places), return_exceptions=True)
        if any(isinstance(each, BaseException) for each in outcomes):
            await self._discard(nodes, infos, places)
            raise_one(outcomes, PutFailed)

    async def copy(
        self,
        nodes: Mapping[str, RemoteStore],
        info: store_pb2.ObjectInfo,
        have: list[str],
        node_id: str,
        reasons: list[str],
        *,
        surplus: bool = False,
    ) -> bool:
        """Make a node read an object from the first of ``have``, which grows. A failure adds to
        ``reasons``."""
        try:
            source = await nodes[have[0]].kv_address()
            request = store_pb2.CopyRequest(
                owner=self._tenant.owner,
                key=info.key,
                storage=info.storage,
                source=source,
                surplus=surplus,
                join=surplus,
            )
            await nodes[node_id].call("Copy", request)
        except (NodeUnavailable, RemoteError) as error:
            reasons.append(str(error))
            return False
        have.append(node_id)
        return True

    async def _publish(
        self,
        nodes: Mapping[str, RemoteStore],
        infos: Sequence[store_pb2.ObjectInfo],
        places: Sequence[list[str]],
        options: PutOptions,
    ) -> None:
        """Change the records: from now on the names mean these bytes."""
        by_node: dict[str, list[int]] = {}
        for number, each in enumerate(places):
            by_node.setdefault(each[0], []).append(number)
        ttl_ms = 0 if options.ttl_s is None else max(1, round(options.ttl_s * 1000))

        async def publish(node_id: str, numbers: Sequence[int]) -> None:
            objects = [
                store_pb2.PublishObject(
                    key=infos[each].key,
                    storage=infos[each].storage,
                    places=places[each],
                    copies=options.copies,
                    pin=options.pin,
                    ttl_ms=ttl_ms,
                )
                for each in numbers
            ]
            request = store_pb2.PublishRequest(owner=self._tenant.owner, objects=objects)
            name = infos[numbers[0]].name
            try:
                reply: store_pb2.PublishReply = await nodes[node_id].call("Publish", request)
            except NodeUnavailable as error:
                raise OutcomeUnknown(f"{name!r} was stored", str(error)) from error
            except RemoteError as error:
                if error.kind in ("RecordsUnavailable", "RecordsLost"):
                    await self._discard(
                        nodes, [infos[each] for each in numbers], [places[each] for each in numbers]
                    )
                    raise NoRecords(error.details) from error
                # Whatever went wrong, Redis may have been told.
                raise OutcomeUnknown(f"{name!r} was stored", error.details) from error
            for each, reason in zip(numbers, reply.error, strict=True):
                if reason:
                    await self._discard(nodes, [infos[each]], [places[each]])
                    raise PutFailed(infos[each].name, "was not stored", [reason])

        outcomes = await asyncio.gather(*(publish(*each) for each in by_node.items()), return_exceptions=True)
        raise_one(outcomes, OutcomeUnknown)

    async def _discard(
        self,
        nodes: Mapping[str, RemoteStore],
        infos: Sequence[store_pb2.ObjectInfo],
        places: Sequence[Sequence[str]],
    ) -> None:
        """Drop bytes that no record names. Nodes that do not answer drop them in time."""
        storage = [info.storage for info in infos]
        request = store_pb2.AbortRequest(owner=self._tenant.owner, storage=storage)
        holders = {node_id for each in places for node_id in each}

        async def abort(node: RemoteStore) -> None:
            try:
                await node.call("Abort", request)
            except (NodeUnavailable, RemoteError) as error:
                log.info("%s keeps bytes of a put that failed for a while: %s", node.node_id, error)

        await asyncio.gather(*(abort(nodes[node_id]) for node_id in holders))


def _order(key: bytes, nodes: Mapping[str, RemoteStore], preferred: str = "") -> list[str]:
    # Stable: the object's own order among healthy nodes and among the others.
    order = sorted(preference_order(key, nodes), key=lambda node_id: not nodes[node_id].healthy)
    return [preferred, *(each for each in order if each != preferred)] if preferred else order


def _hosts(nodes: Mapping[str, RemoteStore]) -> set[str]:
    return {node.host_id for node in nodes.values()}


def _hosts_in_words(nodes: Mapping[str, RemoteStore]) -> str:
    return (
        f"{len(nodes)} store nodes are ready on {len(_hosts(nodes))} hosts; nodes that do not fail "
        "together may have different node.host_id"
    )


def _check_hosts(name: str, nodes: Mapping[str, RemoteStore], copies: int) -> None:
    """Two copies on one host would be lost together: they are not counted as two."""
    if copies > len(_hosts(nodes)):
        what = f"was not stored: it can be on {len(_hosts(nodes))} hosts, {copies} were requested"
        raise PutFailed(name, what, [_hosts_in_words(nodes)])


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
