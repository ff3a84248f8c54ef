"""What the index costs and how fast it is, against a Redis of its own in another process."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil

from moonpool.kvstore.blocks.keys import BlockKey, unpack
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.node_publisher import BATCH_BLOCKS
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.runtime.reports.report import Row

_CHAIN_BLOCKS = 1024
_LOOKUPS = 10_000


@dataclass(frozen=True, slots=True)
class Settings:
    redis_url: str
    num_blocks: int = 1_000_000
    num_nodes: int = 16
    rounds: int = 5


class Session:
    """Fills an index, reads it into a mirror, asks the mirror, and watches changes arrive."""

    def __init__(self, settings: Settings, note: Callable[[str], None]) -> None:
        self._settings = settings
        self._note = note
        self._client = connect(settings.redis_url)
        self._index = KVIndex(self._client, f"bench-{os.getpid()}")
        self._chains: list[list[BlockKey]] = []
        self._case = f"{settings.num_blocks:,} blocks on {settings.num_nodes:,} nodes"

    async def run(self) -> list[Row]:
        """Every figure. The index's own keys are removed at the end."""
        try:
            rows = await self._publish()
            self._note("reading everything")
            rows += await self._bootstrap()
            self._note("changes as they are seen by a mirror in another process")
            rows += await self._visibility()
            return rows
        finally:
            for node_id in await self._index.node_ids():
                await self._index.drop(node_id, 1, only_lapsed=False)
            await self._client.delete(self._index._meta, self._index._events, self._index._marks)
            await self._client.aclose()

    def _node(self, number: int) -> str:
        return f"node-{number % self._settings.num_nodes}"

    async def _publish(self) -> list[Row]:
        index, case = self._index, self._case
        used_before = (await self._client.info("memory"))["used_memory"]
        for number in range(self._settings.num_nodes):
            await index.register(NodeRecord(self._node(number), 1, "prefill"), 3600)
        server = psutil.Process((await self._client.info("server"))["process_id"])
        cpu_before, seconds, done = sum(server.cpu_times()[:2]), 0.0, 0
        rates = []
        while done < self._settings.num_blocks:
            data = os.urandom(16 * _CHAIN_BLOCKS)
            keys = [BlockKey(data[at : at + 16]) for at in range(0, len(data), 16)]
            self._chains.append(keys)
            started = perf_counter()
            stored = [(key, Tier.POOL) for key in keys]
            for first in range(0, len(stored), BATCH_BLOCKS):
                await index.publish(self._node(len(self._chains)), 1, stored[first : first + BATCH_BLOCKS])
            took = perf_counter() - started
            seconds, done = seconds + took, done + len(keys)
            rates.append(len(keys) / took)
            if len(self._chains) % 100 == 0:
                self._note(f"publishing: {done:,} blocks")
        cpu = sum(server.cpu_times()[:2]) - cpu_before
        used = (await self._client.info("memory"))["used_memory"] - used_before
        stream = await self._client.memory_usage(index._events, samples=0) or 0
        return [
            Row(case, "publish", done / seconds, "blocks/s", p50=median(rates), **_at_least(150_000)),
            Row(case, "publish, server CPU", cpu / done * 1e6, "µs/block"),
            Row(case, "Redis memory, logs", (used - stream) / done, "bytes/block", **_at_most(40)),
            Row(case, "Redis memory, logs and stream", used / done, "bytes/block", **_at_most(40)),
        ]

    async def _bootstrap(self) -> list[Row]:
        process, case = psutil.Process(), self._case
        before = process.memory_info().rss
        mirror = IndexMirror(self._index)
        started = perf_counter()
        await mirror.start()
        took = perf_counter() - started
        nbytes = process.memory_info().rss - before
        await mirror.caught_up()
        rows = [
            Row(case, "bootstrap of a mirror", took, "s", **_at_most(2.5)),
            Row(case, "mirror memory", nbytes / mirror.num_blocks, "bytes/block", **_at_most(150)),
        ]
        for length, least in ((128, 300_000), (1024, 90_000)):
            self._note(f"lookups of {length} blocks")
            rows.append(self._lookups(mirror, length, least))
        await mirror.close()
        return rows

    def _lookups(self, mirror: IndexMirror, length: int, least: float) -> Row:
        """Chains of which a random part is held; a plain dict of key to int, searched likewise, in turn."""
        rng = random.Random(length)
        queries = []
        for _ in range(_LOOKUPS):
            chain, held = rng.choice(self._chains), rng.randrange(1, length + 1)
            queries.append(b"".join(chain[:held]) + rng.randbytes(16 * (length - held)))
        plain = {key: 1 for chain in self._chains for key in chain}
        ours, limit = [], []
        for _ in range(self._settings.rounds):
            ours.append(_times(mirror.longest_prefix, queries))
            limit.append(_times(lambda keys: _search(plain, keys), queries))
        rates = [len(queries) / sum(times) for times in ours]
        middle = sorted(ours[rates.index(sorted(rates)[len(rates) // 2])])
        return Row(
            self._case,
            f"lookups of {length} blocks",
            median(rates),
            "1/s",
            p50=1 / middle[len(middle) // 2],
            p99=1 / middle[len(middle) * 99 // 100],
            peer="plain dict",
            peer_value=median(len(queries) / sum(times) for times in limit),
            **_at_least(least),
        )

    async def _visibility(self) -> list[Row]:
        """From publishing in this process to the mirror of another one, at 50,000 blocks/s."""
        command = [
            sys.executable,
            "-m",
            "moonpool.bench.index.mirror_child",
            self._settings.redis_url,
            self._index.namespace,
        ]
        watcher = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=Path(__file__).parents[3]
        )
        assert watcher.stdout is not None
        assert watcher.stdin is not None
        try:
            await watcher.stdout.readline()
            sent = []
            due = perf_counter()
            for number in range(1000):
                keys = [BlockKey(os.urandom(16)) for _ in range(128)]
                sent.append((keys[-1].hex(), perf_counter()))
                await self._index.publish(self._node(number), 1, [(key, Tier.POOL) for key in keys])
                due += 128 / 50_000
                await asyncio.sleep(max(due - perf_counter(), 0))
            watcher.stdin.write(b"\n")
            seen = dict(line.split() for line in (await watcher.stdout.read()).decode().splitlines())
        finally:
            if watcher.returncode is None:
                watcher.kill()
            await watcher.wait()
        # perf_counter is the machine's monotonic clock: the same in both processes.
        delays = sorted(float(seen[key]) - at for key, at in sent)
        p50, p99 = delays[len(delays) // 2] * 1e3, delays[len(delays) * 99 // 100] * 1e3
        return [
            Row(
                "changes at 50,000 blocks/s",
                "seen in a mirror, p99",
                p99,
                "ms",
                p50=p50,
                p99=p99,
                **_at_most(10.0),
            )
        ]


def _search(plain: dict[BlockKey, int], keys: list[BlockKey]) -> int:
    get, low, high = plain.get, 0, len(keys)
    while low < high:
        middle = (low + high + 1) >> 1
        if get(keys[middle - 1], 0):
            low = middle
        else:
            high = middle - 1
    return low


def _times(function: Callable[[list[BlockKey]], object], queries: list[bytes]) -> list[float]:
    """Seconds of each call. Its keys were made just before, as a request's are: hashes not known."""
    times = []
    for query in queries:
        keys = unpack(query)
        started = perf_counter()
        function(keys)
        times.append(perf_counter() - started)
    return times


def _at_least(value: float) -> dict[str, Any]:
    return {"limit": "at least", "limit_value": float(value)}


def _at_most(value: float) -> dict[str, Any]:
    return {"limit": "at most", "limit_value": float(value)}
