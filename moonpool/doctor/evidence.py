"""The state that the processes of a cluster report, read once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc.aio
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
from moonpool.runtime.observing.metrics_server import metrics_headers
from moonpool.runtime.security import process

_ASK_TIMEOUT_S = 3.0
_ASKED_AT_ONCE = 16


class Page:
    """The samples of one process' ``/metrics``."""

    def __init__(self, text: str = "") -> None:
        """Raises ``ValueError`` if ``text`` is not in Prometheus' format."""
        self._samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def of(self, **labels: str) -> Page:
        """Return the samples that have these labels."""
        page = Page()
        page._samples = [each for each in self._samples if labels.items() <= each[1].items()]
        return page

    def total(self, name: str, **labels: str) -> float:
        """Sum the samples of this name that have these labels; 0: there is none."""
        return sum(value for _, value in self.samples(name, **labels))

    def samples(self, name: str, **labels: str) -> list[tuple[Mapping[str, str], float]]:
        return [
            (found, value)
            for each, found, value in self._samples
            if each == name and labels.items() <= found.items()
        ]


@dataclass(frozen=True, slots=True)
class Evidence:
    """``cluster`` is ``/v1/cluster``, ``live`` one event of ``/v1/live``; the rest may be incomplete."""

    cluster: Mapping[str, Any]
    live: Mapping[str, Any] = field(default_factory=dict)
    pages: Mapping[str, Page] = field(default_factory=dict)  # of nodes
    records: Mapping[str, NodeRecord] | None = None  # in Redis; None: not read
    alive: frozenset[str] = frozenset()  # nodes that answer though their lease has ended

    @property
    def nodes(self) -> Sequence[Mapping[str, Any]]:
        nodes: Sequence[Mapping[str, Any]] = self.cluster["nodes"]
        return nodes

    @property
    def holders(self) -> Sequence[Mapping[str, Any]]:
        """The entries with a name in the index: the replicas of a node that has several, else the node."""
        return [holder for node in self.nodes for holder in holders(dict(node))]

    @property
    def ended(self) -> dict[str, str]:
        """The nodes that ended without notice, among the latest events, and how: the end of a sentence."""
        how = {"lapsed": "was gone: its lease lapsed", "restarted": "ended and was started again"}
        return {
            event["node"]: how[event["text"]]
            for event in self.live.get("events", ())
            if event["kind"] == "left" and event["text"] in how
        }

    def page(self, holder: Mapping[str, Any]) -> Page:
        """Return the samples of this holder; empty if its page could not be read."""
        replica = holder.get("replica")
        if replica is None:
            return self.pages.get(holder["node_id"], Page())
        return self.pages.get(replica["node_id"], Page()).of(replica=str(replica["number"]))


async def gather(url: str, index: IndexOptions, api_key: str = "") -> Evidence:
    """Ask the conductor at ``url``, its nodes, and the index if ``index`` has its URL.

    A node or index that does not answer is left out.

    Raises:
        ApiError: the conductor does not answer.
    """
    async with Client(url, api_key=api_key) as client:
        cluster = await client.cluster()
        async with aclosing(client.live()) as events:
            live: dict[str, Any] = await anext(events, {})
        nodes = {node["node_id"]: node["metrics_url"] for node in cluster["nodes"] if node["metrics_url"]}
        pages = await _pages(list(nodes.values()))
    return Evidence(
        cluster,
        live,
        dict(zip(nodes, pages, strict=True)),
        await _records(index) if index.redis_url else None,
        await _alive(lapsed(live, cluster)),
    )


def lapsed(live: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, str]:
    """Return the addresses of nodes that left without notice and have not rejoined."""
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
    headers = metrics_headers(process.current())

    async def page(session: aiohttp.ClientSession, url: str) -> Page:
        async with turns:
            try:
                async with session.get(url, headers=headers) as answer:
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
