"""Blocks between the ranks of two plans, and between ranks and their node's host memory."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import Call, spread, turns
from moonpool.bench.parallel.steps import Settings
from moonpool.engine.node.engine_memory import EngineMemory
from moonpool.engine.prefix_cache.peer_exchange import PeerExchange
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.kvstore.blocks.shards import BlockShard, overlaps
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import Config, EngineOptions, ModelOptions, ParallelOptions
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.reports.report import Row, versus
from moonpool.transfer import TransferAgent, move_runs

BLOCK_TOKENS = 64
BLOCKS = f"blocks of {BLOCK_TOKENS} tokens"
SAVED, LOADED = f"{BLOCKS} saved", f"{BLOCKS} loaded"
_LIMIT = "as many runs copied and checksummed in one process"
_DEADLINE_S = 30.0
_BETWEEN_NODES = ("shm", "tcp")
_WITHIN_A_NODE = ("local", "cuda-ipc", "shm", "tcp")
# (case, whether ranks share no pools with their leader, transports). No process maps a pool on a GPU.
MAPPED_POOLS, REMOTE_POOLS, TCP_POOLS = "pools shared", "pools apart", "pools apart, over TCP of this machine"
_STORES = (
    (MAPPED_POOLS, False, _WITHIN_A_NODE),
    (REMOTE_POOLS, True, _WITHIN_A_NODE),
    (TCP_POOLS, True, ("local", "tcp")),
)


@dataclass(frozen=True, slots=True)
class Side:
    """A node's engine memory, with blocks allocated."""

    agent: TransferAgent
    memory: EngineMemory
    exchange: PeerExchange
    address: node_pb2.KvAddress
    blocks: list[int]


@asynccontextmanager
async def _side(
    settings: Settings,
    name: str,
    plan: ParallelPlan,
    transports: tuple[str, ...] = _BETWEEN_NODES,
    *,
    separate_pools: bool = False,
) -> AsyncIterator[Side]:
    """transports: between two nodes by default, though the leaders of both sides are in this process."""
    config = Config()
    options = EngineOptions(
        block_size=BLOCK_TOKENS,
        # Room for the blocks of a large model on GPUs, of the shipped one elsewhere.
        pool_nbytes=((64 << 20) if settings.device == "cpu" else (2 << 30)) * plan.world_size,
        parallel=ParallelOptions(tp=plan.tp, pp=plan.pp, cp=plan.cp),
    )
    transfer = replace(config.transfer, transports=transports)
    model = ModelOptions(path=str(settings.model), device=settings.device)
    config = replace(config, engine=options, model=model, transfer=transfer)
    async with await TransferAgent.start(config.transfer, agent_id=name, epoch=1) as agent:
        memory = await EngineMemory.open(config, agent, lambda *_: None, separate_pools=separate_pools)
        layout = memory.engine.layout
        exchange = PeerExchange(
            memory.blocks, agent, deadline_s=_DEADLINE_S, reader=memory.reader, in_parts=bool(memory.ranks)
        )
        address = node_pb2.KvAddress(
            node_id=name,
            agent=agent.describe().pack(),
            layout_fingerprint=layout.fingerprint,
            block_nbytes=layout.block_nbytes,
            ranks=memory.ranks,
        )
        try:
            yield Side(agent, memory, exchange, address, memory.engine.pool.allocate(settings.num_blocks))
        finally:
            await memory.engine.close()
            await memory.blocks.close()


async def handover_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Verified reads between each pair of plans, and in main memory the copy that limits them."""
    plans, num_blocks = settings.plans, settings.num_blocks
    pairs = [(i, j) for i in range(len(plans)) for j in range(len(plans))]
    async with AsyncExitStack() as stack:
        sources, targets = [
            [await stack.enter_async_context(_side(settings, f"{name} {plan}", plan)) for plan in plans]
            for name in ("source", "target")
        ]
        described = [await source.memory.blocks.describe(source.blocks) for source in sources]
        contestants: dict[tuple[int, int, str], Call] = {}
        limits: list[StridedCopy] = []
        if settings.device == "cpu":
            there, here = ([Pools(side.memory, num_blocks) for side in of] for of in (sources, targets))
            limits = [StridedCopy(there[i], here[j], num_blocks) for i, j in pairs]
        for number, (i, j) in enumerate(pairs):
            contestants[i, j, "read"] = partial(_read, sources[i], targets[j], described[i])
            if limits:
                contestants[i, j, "limit"] = limits[number].copy
        seconds = await turns(contestants, run.rounds)
        nbytes = num_blocks * sources[0].memory.engine.layout.block_nbytes

    def gb_per_s(*key: object) -> float:
        return nbytes / statistics.median(seconds[key]) / 1e9  # type: ignore[index]

    for i, j in pairs:
        case = f"{plans[i]} → {plans[j]}"
        row = Row(case, BLOCKS, gb_per_s(i, j, "read"), "GB/s")
        yield row if i == j else versus(row, "equal plans", gb_per_s(j, j, "read"))
        yield spread(case, f"{num_blocks} {BLOCKS}", seconds[i, j, "read"], "s")
        if limits:
            yield Row(case, _LIMIT, gb_per_s(i, j, "limit"), "GB/s")


async def _read(source: Side, target: Side, blocks: node_pb2.BlockSpans) -> float:
    """Returns seconds, without those of connecting."""
    peer = await target.exchange.connect(source.address)
    began_s = time.perf_counter()
    await target.exchange.read(peer, blocks, 0, target.blocks, deadline_s=_DEADLINE_S)
    return time.perf_counter() - began_s


class Pools:
    """Memory of this process, in the shape of the pools of a node's ranks; cp ranks, which have different
    blocks, count as one."""

    def __init__(self, node: EngineMemory, num_blocks: int) -> None:
        self.layout = node.engine.layout
        ranks = [shard for shard in node.engine.shards if shard.cp_rank == 0]
        self.shards = [BlockShard(shard.layers, shard.kv_heads) for shard in ranks]
        # Written to, so that all pages exist.
        self.arrays = [
            np.ones(num_blocks * shard.block_nbytes(self.layout), np.uint8) for shard in self.shards
        ]

    def address(self, rank: int, offset: int) -> int:
        return int(self.arrays[rank].__array_interface__["data"][0]) + offset


class StridedCopy:
    """The limit: runs between two nodes' pools, copied and checksummed by a thread on each usable core."""

    def __init__(self, source: Pools, target: Pools, num_blocks: int) -> None:
        # The addresses below point into them.
        self._pools = source, target
        layout, theirs, ours = source.layout, source.shards, target.shards
        # (to, from, bytes, bytes from block to block here, and there), of the first block.
        runs = sorted(
            (
                target.address(i, run.target),
                source.address(overlap.source, run.source),
                run.nbytes,
                shard.block_nbytes(layout),
                theirs[overlap.source].block_nbytes(layout),
            )
            for i, shard in enumerate(ours)
            for overlap in overlaps(layout, theirs, shard, i)
            for run in overlap.runs
        )
        here, there, nbytes, step_here, step_there = np.array(runs, np.uint64).T
        blocks = np.arange(num_blocks, dtype=np.uint64)[:, None]
        self._to = (here + blocks * step_here).reshape(-1)
        self._from = (there + blocks * step_there).reshape(-1)
        self._nbytes = np.tile(nbytes, num_blocks)
        self._counts = np.full(num_blocks, len(runs), np.uint32)

    def copy(self) -> None:
        num_threads = usable_cores()
        cuts = [len(self._counts) * i // num_threads for i in range(num_threads + 1)]
        threads = [threading.Thread(target=self._copy, args=(slice(*cut),)) for cut in pairwise(cuts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _copy(self, blocks: slice) -> None:
        counts, num_runs = self._counts[blocks], int(self._counts[0])
        rows = slice(blocks.start * num_runs, blocks.stop * num_runs)
        digests = np.empty(len(counts), np.uint64)
        move_runs(self._to[rows], self._from[rows], self._nbytes[rows], counts, digests=digests)


async def saving_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Blocks to host memory and back, where the leader maps the ranks' pools and where it does not."""
    kinds = _STORES if settings.device == "cpu" else _STORES[1:]
    for plan in (plan for plan in settings.plans if plan.world_size > 1):
        contestants: dict[tuple[str, str], Call] = {}
        async with AsyncExitStack() as stack:
            for kind, separate_pools, transports in kinds:
                side = _side(settings, kind, plan, transports, separate_pools=separate_pools)
                store = _HostCopy(await stack.enter_async_context(side))
                contestants[kind, SAVED] = store.save
                contestants[kind, LOADED] = store.load
            seconds = await turns(contestants, run.rounds)
        for metric in (SAVED, LOADED):
            rates = {
                kind: store.nbytes / statistics.median(seconds[kind, metric]) / 1e9 for kind, _, _ in kinds
            }
            first = kinds[0][0]
            for kind, rate in rates.items():
                row = Row(f"{plan}, {kind}", metric, rate, "GB/s")
                yield row if kind == first else versus(row, first, rates[first])


class _HostCopy:
    """A node, and host memory for its blocks."""

    def __init__(self, node: Side) -> None:
        count, nbytes = len(node.blocks), node.memory.engine.layout.block_nbytes
        self.nbytes = count * nbytes
        self._node = node
        self._host = list(node.agent.allocate(self.nbytes, "host").array.reshape(count, nbytes))
        self._checksums: list[int] = []

    async def save(self) -> None:
        blocks = self._node.memory.blocks
        self._checksums = await asyncio.to_thread(blocks.bytes.copy_out, self._node.blocks, self._host)

    async def load(self) -> None:
        assert await self._node.memory.blocks.copy_in(self._host, self._node.blocks, self._checksums) is None
