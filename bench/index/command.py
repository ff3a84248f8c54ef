"""The command ``moonpool bench index``: costs and speed of the index, over Redis in a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from time import perf_counter

import click
import psutil

from moonpool.bench.harness.child import served
from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.services import redis
from moonpool.bench.harness.turns import Percentiles, percentiles, spread, turns
from moonpool.kvstore.blocks.keys import BlockKey, unpack
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.block_map import BlockMap
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.node_publisher import BATCH_BLOCKS
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.runtime.reports.conditions import CacheState, Conditions
from moonpool.runtime.reports.report import Row

_CHAIN_BLOCKS = 1024
_LOOKUPS = 10_000
_FLEET_NODES, _FLEET_BLOCKS = 1024, 1_000_000
_CHANGES, _CHANGE_BLOCKS, _BLOCKS_PER_S = 1000, 128, 50_000


@dataclass(frozen=True, slots=True)
class Settings:
    redis_url: str
    num_blocks: int
    num_nodes: int


class _Index:
    """An index that the benchmark fills, and removes at the end."""

    def __init__(self, run: Run, settings: Settings, redis_url: str) -> None:
        self._run = run
        self._settings = settings
        self._redis_url = redis_url
        self._client = connect(redis_url)
        self._index = KVIndex(self._client, f"bench-{os.getpid()}")
        self._chains: list[list[BlockKey]] = []
        self._case = f"{settings.num_blocks:,} blocks on {settings.num_nodes:,} nodes"

    async def close(self) -> None:
        for node_id in await self._index.node_ids():
            await self._index.drop(node_id, 1, only_lapsed=False)
        await self._client.delete(self._index._meta, self._index._events, self._index._marks)
        await self._client.aclose()

    def _node(self, number: int) -> str:
        return f"node-{number % self._settings.num_nodes}"

    async def publish_rows(self) -> list[Row]:
        index, case = self._index, self._case
        used_before = (await self._client.info("memory"))["used_memory"]
        for number in range(self._settings.num_nodes):
            await index.register(NodeRecord(self._node(number), 1, "prefill"), 3600)
        cpu_before, seconds, done = await self._server_cpu_s(), 0.0, 0
        rates = []
        while done < self._settings.num_blocks:
            data = os.urandom(16 * _CHAIN_BLOCKS)
            keys = [BlockKey(data[at : at + 16]) for at in range(0, len(data), 16)]
            self._chains.append(keys)
            began_s = perf_counter()
            stored = [(key, Tier.POOL) for key in keys]
            for first in range(0, len(stored), BATCH_BLOCKS):
                await index.publish(self._node(len(self._chains)), 1, stored[first : first + BATCH_BLOCKS])
            took_s = perf_counter() - began_s
            seconds, done = seconds + took_s, done + len(keys)
            rates.append(len(keys) / took_s)
        cpu_s = await self._server_cpu_s() - cpu_before
        used = (await self._client.info("memory"))["used_memory"] - used_before
        stream = await self._client.memory_usage(index._events, samples=0) or 0
        return [
            Row(case, "publish", done / seconds, "blocks/s", p50=median(rates)),
            Row(case, "publish, server CPU", cpu_s / done * 1e6, "µs/block"),
            Row(case, "Redis memory, logs", (used - stream) / done, "bytes/block"),
            Row(case, "Redis memory, logs and stream", used / done, "bytes/block"),
        ]

    async def _server_cpu_s(self) -> float:
        """As it counts it: its process may be of another machine."""
        used = await self._client.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])

    async def bootstrap_rows(self) -> list[Row]:
        process, case = psutil.Process(), self._case
        before = process.memory_info().rss
        mirror = IndexMirror(self._index)
        began_s = perf_counter()
        await mirror.start()
        took_s = perf_counter() - began_s
        nbytes = process.memory_info().rss - before
        await mirror.caught_up()
        rows = [
            Row(case, "bootstrap of a mirror", took_s, "s"),
            Row(case, "mirror memory", nbytes / mirror.num_blocks, "bytes/block"),
        ]
        for length in (128, 1024):
            self._run.say(f"lookups of {length} blocks")
            rows.append(await self._lookups(mirror, length))
        await mirror.close()
        return rows

    async def _lookups(self, mirror: IndexMirror, length: int) -> Row:
        """Chains with a random part known. The limit: a plain dict of key to int, searched alike."""
        rng = random.Random(length)
        queries = []
        for _ in range(_LOOKUPS):
            chain, known = rng.choice(self._chains), rng.randrange(1, length + 1)
            queries.append(b"".join(chain[:known]) + rng.randbytes(16 * (length - known)))
        plain = {key: 1 for chain in self._chains for key in chain}
        contestants = {
            "ours": lambda: _times(mirror.longest_prefix, queries),
            "plain dict": lambda: _times(lambda keys: _search(plain, keys), queries),
        }
        seconds = await turns(contestants, self._run.rounds, warm_up=0)
        ours, plain_rate = (
            [_LOOKUPS / sum(of[at : at + _LOOKUPS]) for at in range(0, len(of), _LOOKUPS)]
            for of in seconds.values()
        )
        return Row(
            self._case,
            f"lookups of {length} blocks",
            median(ours),
            "1/s",
            peer="plain dict",
            peer_value=median(plain_rate),
            **_rates(seconds["ours"]),
        )

    def fleet_row(self) -> Row:
        """A fleet's map alone: chains of 128 blocks, each on one to eight of 1,024 nodes."""
        rng, blocks = random.Random(_FLEET_NODES), BlockMap()
        names = [f"node-{number}" for number in range(_FLEET_NODES)]
        for name in names:
            blocks.join(name)
        chains = [
            rng.randbytes(16 * 128) for _ in range(min(self._settings.num_blocks, _FLEET_BLOCKS) // 128)
        ]
        for known in chains:
            for name in rng.sample(names, rng.randrange(1, 9)):
                blocks.store(name, known[: 16 * rng.randrange(1, 129)], Tier.POOL)
        seconds: list[list[float]] = []
        for _ in range(self._run.rounds):
            seconds.append(_times(blocks.prefix_map, [rng.choice(chains) for _ in range(_LOOKUPS)]))
        return Row(
            f"{len(chains) * 128:,} blocks on {_FLEET_NODES:,} nodes",
            "prefix maps of 128 blocks",
            median(_LOOKUPS / sum(each) for each in seconds),
            "1/s",
            **_rates([*chain.from_iterable(seconds)]),
        )

    async def visibility_row(self) -> Row:
        """From publishing in this process to the mirror of another one."""
        mirror = served(
            "a mirror",
            "moonpool.bench.index.mirror",
            "Mirror",
            redis_url=self._redis_url,
            namespace=self._index.namespace,
        )
        async with mirror as child:
            sent = []
            due_s = perf_counter()
            for number in range(_CHANGES):
                keys = [BlockKey(os.urandom(16)) for _ in range(_CHANGE_BLOCKS)]
                sent.append((keys[-1].hex(), perf_counter()))
                await self._index.publish(self._node(number), 1, [(key, Tier.POOL) for key in keys])
                due_s += _CHANGE_BLOCKS / _BLOCKS_PER_S
                await asyncio.sleep(max(due_s - perf_counter(), 0))
            seen = await child.call("seen")
        # perf_counter is the machine's monotonic clock: the same in both processes.
        delays_ms = [1e3 * (seen[key] - at_s) for key, at_s in sent]
        row = spread(f"changes at {_BLOCKS_PER_S:,} blocks/s", "seen in a mirror, p99", delays_ms, "ms")
        return replace(row, value=row.p99 or 0.0, samples=None)


async def index_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    async with redis(settings.redis_url) as url:
        index = _Index(run, settings, url)
        try:
            for row in await index.publish_rows() + await index.bootstrap_rows():
                yield row
            run.say("lookups among many nodes")
            yield index.fleet_row()
            run.say("changes as they are seen by a mirror in another process")
            yield await index.visibility_row()
        finally:
            await index.close()


def _search(plain: dict[BlockKey, int], keys: list[BlockKey]) -> int:
    get, low, high = plain.get, 0, len(keys)
    while low < high:
        middle = (low + high + 1) >> 1
        if get(keys[middle - 1], 0):
            low = middle
        else:
            high = middle - 1
    return low


def _rates(seconds: list[float]) -> Percentiles:
    """1/s by percentile of the seconds."""
    of = percentiles(seconds)
    return {"p50": 1 / of["p50"], "p90": 1 / of["p90"], "p95": 1 / of["p95"], "p99": 1 / of["p99"]}


def _times(function: Callable[[list[BlockKey]], object], queries: Sequence[bytes]) -> list[float]:
    """Seconds of each call. Its keys were made just before, as a request's are: without cached hashes."""
    times = []
    for query in queries:
        keys = unpack(query)
        began_s = perf_counter()
        function(keys)
        times.append(perf_counter() - began_s)
    return times


@benchmark({"index": index_rows}, packages=("redis", "hiredis", "uvloop"))
@click.option("--redis", "redis_url", default="", metavar="URL", help="Without it: a private one.")
@click.option("--blocks", default=1_000_000, type=click.IntRange(min=128))
@click.option("--nodes", default=16, type=click.IntRange(min=1))
def index(run: Run, redis_url: str, blocks: int, nodes: int) -> Settings:
    """Measure the index: publishing, memory, a mirror's start, lookups, and how soon changes are seen."""
    blocks = min(blocks, 50_000) if run.quick else blocks
    run.conditions = Conditions(
        [],
        CacheState.holding(0, 0, f"an empty index, that then has {blocks:,} blocks"),
        "nothing: no round is left out",
        {"lookups": 128},
    )
    return Settings(redis_url, blocks, nodes)
