"""The tier on disk against the disk itself, and against others' disk stores, in turns."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from moonpool.bench.store.block_set import Bytes, Shape, TierSettings
from moonpool.bench.store.peers.peer_store import PeerStore
from moonpool.bench.store.raw_disk import RawDisk
from moonpool.bench.transfer.batch_shape import size_name
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers.ssd import SsdTier
from moonpool.runtime.reports.report import Row, versus

# The tier has room for two rounds, which fill it: from then on it is full, and what is put takes the place of
# what was put before, in files that were written before.
_ROOM = 2
PUT_OF_RAW, GET_OF_RAW, PUT_OF_LMCACHE = 0.8, 0.85, 1.5


async def disk_rows(shape: Shape, settings: TierSettings, peers: Sequence[PeerStore]) -> list[Row]:
    """Cold: past the page cache. Durable: synced, with checksums and index, before ``put`` returns."""
    source, into = shape.memory("source"), shape.memory("into")
    raw = RawDisk(settings.directory / "raw", shape, settings.threads, source)
    tier = await SsdTier.open(
        settings.directory / f"tier-{shape.block_nbytes}",
        shape.layout,
        capacity_nbytes=shape.nbytes * _ROOM,
        threads=settings.threads,
    )
    seconds: dict[str, list[float]] = defaultdict(list)
    async with tier:
        for generation in range(settings.rounds + _ROOM):
            order = random.Random(generation).sample(range(shape.num_blocks), shape.num_blocks)
            keys, took = shape.keys(generation), dict[str, float]()
            # Whoever comes after another that leaves its writes to be finished later pays for them.
            first = generation % (2 + len(peers))
            for turn in [*range(first, 2 + len(peers)), *range(first)]:
                if turn == 0:
                    took["put"] = await _put(tier, shape, keys, source)
                    took["get"] = await _get(tier, shape, [keys[i] for i in order], into)
                elif turn == 1:
                    took["raw put"], took["raw get"] = raw.write(), raw.read(order)
                else:
                    peer = peers[turn - 2]
                    took[f"{peer.name} put"], took[f"{peer.name} get"] = await peer.round(order)
            for name, value in took.items() if generation >= _ROOM else ():
                seconds[name].append(value)
    raw.close()
    assert all((into[position] == source[i]).all() for position, i in enumerate(order)), "bytes differ"
    return _rows(shape, seconds, peers)


async def _put(tier: SsdTier, shape: Shape, keys: Sequence[BlockKey], source: Sequence[Bytes]) -> float:
    started = time.perf_counter()
    for batch in shape.batches():
        stored = await tier.put(keys[batch], source[batch], parents=[None] * len(keys[batch]))
        assert all(stored)
    return time.perf_counter() - started


async def _get(tier: SsdTier, shape: Shape, keys: Sequence[BlockKey], into: Sequence[Bytes]) -> float:
    started = time.perf_counter()
    for batch in shape.batches():
        assert all(await tier.get(keys[batch], into[batch]))
    return time.perf_counter() - started


def _rows(shape: Shape, seconds: dict[str, list[float]], peers: Sequence[PeerStore]) -> list[Row]:
    def rate(name: str) -> float:
        return shape.nbytes / median(seconds[name]) / 1e9

    rows = []
    for what, text, goal in (("put", "durable", PUT_OF_RAW), ("get", "cold, random", GET_OF_RAW)):
        case = f"disk {what}, {text}, {size_name(shape.block_nbytes)}, batches of {shape.batch}"
        of_raw = goal if shape.block_nbytes in (1 << 20, 4 << 20) else None
        row = Row(case, "throughput", rate(what), "GB/s")
        rows.append(_limited(versus(row, "raw disk", rate(f"raw {what}")), of_raw))
        for peer in peers:
            goal_of_peer = PUT_OF_LMCACHE if what == "put" and peer.name.startswith("lmcache") else None
            rows.append(_limited(versus(row, peer.name, rate(f"{peer.name} {what}")), goal_of_peer))
    return rows


def _limited(row: Row, at_least: float | None) -> Row:
    return row if at_least is None else replace(row, limit="at least", limit_value=at_least)
