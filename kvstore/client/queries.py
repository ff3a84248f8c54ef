"""Questions about objects: to one store node, which asks Redis; or to all, for what they last knew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.client.connections import preference_order
from moonpool.kvstore.client.errors import NoNodeAnswered, NoRecords
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.runtime.errors import NodeUnavailable, RemoteError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """An object as its record describes it. ``nodes``: those with its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    version: int  # microseconds since 1970 at its put, on Redis's clock; grows with each put
    nodes: tuple[str, ...]
    copies: int  # as its put requested
    pin: str  # "", "soft" or "hard"
    expires_s: float  # since 1970; 0: never

    @classmethod
    def of(cls, record: store_pb2.ObjectRecord) -> ObjectStat:
        info = record.info
        return cls(
            info.name,
            info.dtype,
            tuple(info.shape),
            info.nbytes,
            record.version,
            tuple(sorted(record.places)),
            record.copies,
            {store_pb2.SOFT: "soft", store_pb2.HARD: "hard"}.get(record.pin, ""),
            record.expires_ms / 1000,
        )


class Refusals:
    """The nodes that could not answer a question about records, and why: ``error`` when none is left."""

    def __init__(self) -> None:
        self.silent: set[str] = set()  # they did not answer
        self.blind: dict[str, str] = {}  # they cannot ask Redis

    @property
    def node_ids(self) -> set[str]:
        return self.silent | self.blind.keys()

    def add(self, node_id: str, error: NodeUnavailable | RemoteError) -> None:
        """Raises ``error`` if other nodes would answer the same; ``NoRecords``: Redis lost its data."""
        if isinstance(error, NodeUnavailable):
            log.info("%s", error)
            self.silent.add(node_id)
        elif error.kind == "RecordsLost":
            # A node that knows nothing of a loss would say that there are no objects.
            raise NoRecords(error.details) from error
        elif error.kind in ("RecordsUnavailable", "ObjectsOff"):
            self.blind[node_id] = error.details
        else:
            raise error

    def error(self) -> NoRecords | NoNodeAnswered:
        if self.blind:
            return NoRecords(next(iter(self.blind.values())))
        return NoNodeAnswered(sorted(self.silent))


async def ask_any(
    nodes: Mapping[str, RemoteStore], key: bytes, method: str, request: Any, refusals: Refusals | None = None
) -> Any:
    """The answer of the first node that can give one, in the order of ``key``.

    Raises ``RemoteError``, ``NoRecords``, ``NoNodeAnswered``.
    """
    refused = Refusals() if refusals is None else refusals
    for node_id in preference_order(key, nodes):
        try:
            return await nodes[node_id].call(method, request)
        except (NodeUnavailable, RemoteError) as error:
            refused.add(node_id, error)
    raise refused.error()


async def find(
    nodes: Mapping[str, RemoteStore], owner: bytes, keys: Sequence[bytes], *, last_known: bool = False
) -> dict[bytes, store_pb2.ObjectRecord]:
    """The records of those of ``keys`` that exist. ``last_known``: as the nodes that answer last knew them.

    Raises as ``ask_any``; ``NoNodeAnswered``: there are nodes and none answered.
    """
    if not keys:
        return {}
    request = store_pb2.FindRequest(owner=owner, keys=block_keys.pack(keys), last_known=last_known)
    if last_known:
        replies = await query_all(nodes, "Find", request)
        return latest(record for reply in replies.values() for record in reply.found)
    reply: store_pb2.FindReply = await ask_any(nodes, keys[0], "Find", request)
    return {record.info.key: record for record in reply.found}


async def find_whether(nodes: Mapping[str, RemoteStore], owner: bytes, keys: Sequence[bytes]) -> list[bool]:
    """Whether there is a record of each key. Raises as ``ask_any``."""
    if not keys:
        return []
    request = store_pb2.FindRequest(owner=owner, keys=block_keys.pack(keys), only_whether=True)
    reply: store_pb2.FindReply = await ask_any(nodes, keys[0], "Find", request)
    return [bool(each) for each in reply.exists]


async def list_objects(
    nodes: Mapping[str, RemoteStore], owner: bytes, *, last_known: bool = False
) -> dict[bytes, store_pb2.ObjectRecord]:
    """All objects of ``owner``. Raises as ``find``."""
    request = store_pb2.ListRequest(owner=owner, last_known=last_known)
    if last_known:
        replies = await query_all(nodes, "List", request)
        return latest(record for reply in replies.values() for record in reply.objects)
    found: dict[bytes, store_pb2.ObjectRecord] = {}
    while True:
        page: store_pb2.ListReply = await ask_any(nodes, owner, "List", request)
        found |= {record.info.key: record for record in page.objects}
        request.cursor = page.cursor
        if not page.cursor:
            return found


async def query_all(nodes: Mapping[str, RemoteStore], method: str, request: Any) -> dict[str, Any]:
    """Return the answers by node, without nodes that keep no objects and those that did not answer.

    Raises ``RemoteError``; ``NoNodeAnswered``: there are nodes and none answered.
    """
    silent: set[str] = set()

    async def ask(node_id: str) -> Any:
        try:
            return await nodes[node_id].call(method, request)
        except NodeUnavailable as error:
            log.warning("%s", error)
            silent.add(node_id)
        except RemoteError as error:
            if error.kind != "ObjectsOff":
                raise
        return None

    answers = await asyncio.gather(*map(ask, nodes))
    if nodes and silent >= nodes.keys():
        raise NoNodeAnswered(sorted(nodes))
    return {node_id: each for node_id, each in zip(nodes, answers, strict=True) if each is not None}


def latest(found: Iterable[store_pb2.ObjectRecord]) -> dict[bytes, store_pb2.ObjectRecord]:
    """For each key the record of the latest version."""
    by_key: dict[bytes, store_pb2.ObjectRecord] = {}
    for record in found:
        known = by_key.get(record.info.key)
        if known is None or known.version < record.version:
            by_key[record.info.key] = record
    return by_key
