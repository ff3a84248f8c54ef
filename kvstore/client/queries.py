"""Questions to all store nodes, and their combined answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.client.errors import NoNodeAnswered
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.runtime.errors import NodeUnavailable, RemoteError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """An object as store nodes describe it. ``nodes``: those with a copy of this version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    version: int  # nanoseconds since 1970 at its put
    nodes: tuple[str, ...]


async def query_all(
    nodes: Mapping[str, RemoteStore], method: str, request: Any, unreachable: set[str] | None = None
) -> dict[str, Any]:
    """Return the answers by node, without nodes that keep no objects and those that did not answer, which are
    added to ``unreachable``.

    Raises ``RemoteError``; ``NoNodeAnswered``: there are nodes and none answered.
    """
    silent: set[str] = set() if unreachable is None else unreachable

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


async def find_all(
    nodes: Mapping[str, RemoteStore], owner: bytes, keys: Sequence[bytes], unreachable: set[str] | None = None
) -> dict[bytes, ObjectStat]:
    """Of those of ``keys`` that some node has: the latest version and its nodes."""
    request = store_pb2.FindRequest(owner=owner, keys=block_keys.pack(keys))
    replies = await query_all(nodes, "Find", request, unreachable)
    return latest((node_id, info) for node_id, reply in replies.items() for info in reply.found)


async def list_all(nodes: Mapping[str, RemoteStore], owner: bytes) -> dict[bytes, ObjectStat]:
    """All objects of ``owner``. Raises as ``query_all``."""
    found: list[tuple[str, store_pb2.ObjectInfo]] = []

    async def list_node(node_id: str, page: store_pb2.ListReply) -> None:
        while page.objects:
            found.extend((node_id, info) for info in page.objects)
            request = store_pb2.ListRequest(owner=owner, after=page.objects[-1].key)
            page = await nodes[node_id].call("List", request)

    first_pages = await query_all(nodes, "List", store_pb2.ListRequest(owner=owner))
    await asyncio.gather(*(list_node(*first) for first in first_pages.items()))
    return latest(found)


def latest(found: Iterable[tuple[str, store_pb2.ObjectInfo]]) -> dict[bytes, ObjectStat]:
    """For each key the latest version and the nodes that have it."""
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
