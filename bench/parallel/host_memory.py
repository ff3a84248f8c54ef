"""Blocks between the pools of a node's ranks and its host memory: where the leader maps these pools, and
where only transfer agents reach them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from moonpool.bench.parallel.handover import BLOCK_TOKENS, NUM_BLOCKS, Side, side
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.kvstore.store import Bytes
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Row

SAVED, LOADED = (f"blocks of {BLOCK_TOKENS} tokens {done}" for done in ("saved", "loaded"))
SHARED, APART, NETWORK = "pools shared", "pools apart", "pools apart, over TCP of this machine"
_TRANSPORTS = ("local", "cuda-ipc", "shm", "tcp")


@dataclass
class _Store:
    """A node of ranks, and what it saves to."""

    case: str
    node: Side
    host: list[Bytes]
    took_s: dict[str, list[float]] = field(default_factory=lambda: {SAVED: [], LOADED: []})

    async def time(self) -> None:
        blocks, ids = self.node.memory.blocks, self.node.blocks
        began_s = time.perf_counter()
        checksums = await asyncio.to_thread(blocks.bytes.copy_out, ids, self.host)
        self.took_s[SAVED].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        assert await blocks.copy_in(self.host, ids, checksums) is None
        self.took_s[LOADED].append(time.perf_counter() - began_s)


async def measure(model: Path, plans: Sequence[ParallelPlan], rounds: int, device: str) -> list[Row]:
    """Of each plan with several ranks, in turn in each round. On GPUs nobody maps another's pool."""
    kinds = [(APART, True, _TRANSPORTS), (NETWORK, True, ("local", "tcp"))]
    if device == "cpu":
        kinds.insert(0, (SHARED, False, _TRANSPORTS))
    rows: list[Row] = []
    for plan in (plan for plan in plans if plan.world_size > 1):
        async with AsyncExitStack() as stack:
            stores = []
            for kind, separate_pools, transports in kinds:
                node = await stack.enter_async_context(
                    side(model, kind, plan, device, separate_pools=separate_pools, transports=transports)
                )
                nbytes = node.memory.engine.layout.block_nbytes
                region = node.agent.allocate(NUM_BLOCKS * nbytes, "host")
                stores.append(_Store(kind, node, list(region.array.reshape(NUM_BLOCKS, nbytes))))
            for _ in range(rounds + 1):
                for store in stores:
                    await store.time()
        rows += _rows(plan, stores, NUM_BLOCKS * nbytes)
    return rows


def _rows(plan: ParallelPlan, stores: Sequence[_Store], nbytes: int) -> list[Row]:
    """The first round is of cold memory."""
    rows: list[Row] = []
    for metric in (SAVED, LOADED):
        rates = [nbytes / statistics.median(store.took_s[metric][1:]) / 1e9 for store in stores]
        for store, rate in zip(stores, rates, strict=True):
            row = Row(f"{plan}, {store.case}", metric, rate, "GB/s")
            rows.append(row if store is stores[0] else report.versus(row, stores[0].case, rates[0]))
    return rows
