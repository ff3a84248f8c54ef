"""Everything that the processes of a cluster say of themselves, read once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from prometheus_client.parser import text_string_to_metric_families

from moonpool.client import Client
from moonpool.conductor.observing.replica_groups import holders
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import IndexOptions

_ASK_TIMEOUT_S = 3.0
_ASKED_AT_ONCE = 16


class Page:
    """The samples of one process' /metrics."""

    def __init__(self, text: str = "") -> None:
        """Raises ``ValueError`` for what is no such page."""
        self._samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def of(self, **labels: str) -> Page:
        """Those with these labels among theirs."""
        page = Page()
        page._samples = [each for each in self._samples if labels.items() <= each[1].items()]
        return page

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name with these labels among theirs; 0: there is none."""
        return sum(value for _, value in self.samples(name, **labels))

    def samples(self, name: str, **labels: str) -> list[tuple[Mapping[str, str], float]]:
        return [
            (found, value)
            for each, found, value in self._samples
            if each == name and labels.items() <= found.items()
        ]


@dataclass(frozen=True, slots=True)
class Evidence:
    """``cluster`` is ``/v1/cluster``, ``live`` one event of ``/v1/live``; the rest may lack some."""

    cluster: Mapping[str, Any]
    live: Mapping[str, Any] = field(default_factory=dict)
    conductor: Page = field(default_factory=Page)
    pages: Mapping[str, Page] = field(default_factory=dict)  # of nodes
    records: Mapping[str, NodeRecord] | None = None  # in Redis; None: it was not asked
    alive: frozenset[str] = frozenset()  # nodes whose lease has ended, and which answer all the same

    @property
    def nodes(self) -> Sequence[Mapping[str, Any]]:
        nodes: Sequence[Mapping[str, Any]] = self.cluster["nodes"]
        return nodes

    @property
    def holders(self) -> Sequence[Mapping[str, Any]]:
        """Whatever has a name in the index: the replicas of nodes that have several, else the nodes."""
        return [holder for node in self.nodes for holder in holders(dict(node))]

    def page(self, holder: Mapping[str, Any]) -> Page:
        """The samples of this holder alone; none where its page could not be read."""
        replica = holder.get("replica")
        if replica is None:
            return self.pages.get(holder["node_id"], Page())
        return self.pages.get(replica["node_id"], Page()).of(replica=str(replica["number"]))


async def gather(url: str, index: IndexOptions) -> Evidence:
    """Ask the conductor at ``url``, its nodes, and the index where ``index`` says which. Raises ``ApiError``:
    the conductor does not answer. Whatever else does not is left out.
    """
    async with Client(url) as client:
        cluster = await client.cluster()
        live: dict[str, Any] = {}
        async with aclosing(client.live()) as events:
            async for event in events:
                live = event
                break
        nodes = {node["node_id"]: node["metrics_url"] for node in cluster["nodes"] if node["metrics_url"]}
        conductor, *pages = await _pages([f"{client.url}/metrics", *nodes.values()])
    return Evidence(
        cluster,
        live,
        conductor,
        dict(zip(nodes, pages, strict=True)),
        await _records(index) if index.redis_url else None,
        await _alive(lapsed(live, cluster)),
    )


def lapsed(live: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, str]:
    """Nodes that did not say that they leave, and are not back: where they were."""
    where: dict[str, str] = {}
    gone: dict[str, str] = {}
    for event in live.get("events", ()):
        if event["kind"] == "joined":
            where[event["node"]] = event["text"].rpartition(" at ")[2]
        elif event["kind"] == "left" and event["text"] == "lapsed":
            gone[event["node"]] = where.get(event["node"], "")
    present = {holder["node_id"] for node in cluster["nodes"] for holder in holders(node)}
    return {name: address for name, address in gone.items() if address and name not in present}


async def _pages(urls: Sequence[str]) -> list[Page]:
    turns = asyncio.Semaphore(_ASKED_AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)

    async def page(session: aiohttp.ClientSession, url: str) -> Page:
        async with turns:
            try:
                async with session.get(url) as answer:
                    return Page(await answer.text())
            except (aiohttp.ClientError, TimeoutError, ValueError):
                return Page()

    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        return list(await asyncio.gather(*(page(session, url) for url in urls)))


async def _records(options: IndexOptions) -> dict[str, NodeRecord] | None:
    redis = connect(options.redis_url)
    try:
        return dict(await KVIndex(redis, options.namespace).nodes())
    except IndexUnavailable:
        return None
    finally:
        await redis.aclose()


async def _alive(addresses: Mapping[str, str]) -> frozenset[str]:
    async def answers(address: str) -> bool:
        async with rpc.channel(address) as channel:
            try:
                await node_pb2_grpc.NodeStub(channel).Status(node_pb2.StatusRequest(), timeout=_ASK_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return False
        return True

    found = await asyncio.gather(*(answers(address) for address in addresses.values()))
    return frozenset(name for name, yes in zip(addresses, found, strict=True) if yes)
