"""Blocks from the ranks of one plan to those of another, beside blocks between equal plans."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moonpool.bench.parallel.copy_limit import Pools, RunCopy
from moonpool.engine.node.engine_memory import EngineMemory
from moonpool.engine.prefix_cache.peer_exchange import KvSource, PeerExchange
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import Config, EngineOptions, ModelOptions, ParallelOptions
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Row
from moonpool.transfer import TransferAgent

BLOCK_TOKENS = 64
NUM_BLOCKS = 96
BLOCKS = f"blocks of {BLOCK_TOKENS} tokens"
SECONDS = f"{NUM_BLOCKS} blocks of {BLOCK_TOKENS} tokens"
BOUND = "as many runs copied and checksummed in one process"
# Of the bandwidth between equal plans.
GOAL = 0.7
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Side:
    agent: TransferAgent
    memory: EngineMemory
    exchange: PeerExchange
    address: node_pb2.KvAddress
    blocks: list[int]


@asynccontextmanager
async def side(
    model: Path,
    name: str,
    plan: ParallelPlan,
    device: str,
    *,
    separate_pools: bool = False,
    # As between nodes: the leaders of both sides are one process here, which no two nodes are.
    transports: tuple[str, ...] = ("shm", "tcp"),
) -> AsyncIterator[Side]:
    """``separate_pools``: ranks share no pools with their leader."""
    options = EngineOptions(
        block_size=BLOCK_TOKENS,
        # Room for the blocks of a large model on GPUs, of the one that ships elsewhere.
        pool_nbytes=((64 << 20) if device == "cpu" else (2 << 30)) * plan.world_size,
        parallel=ParallelOptions(tp=plan.tp, pp=plan.pp, cp=plan.cp),
    )
    config = Config()
    transfer = replace(config.transfer, transports=transports)
    model_options = ModelOptions(path=str(model), device=device)
    config = replace(config, engine=options, model=model_options, transfer=transfer)
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
            yield Side(agent, memory, exchange, address, memory.engine.pool.allocate(NUM_BLOCKS))
        finally:
            await memory.engine.close()
            await memory.blocks.close()


async def measure(model: Path, plans: Sequence[ParallelPlan], rounds: int, device: str) -> list[Row]:
    """For each pair, in turn in each round: its blocks, checksums verified; and in main memory what bounds
    them."""
    async with AsyncExitStack() as stack:
        sources, targets = [
            [await stack.enter_async_context(side(model, f"{name} {plan}", plan, device)) for plan in plans]
            for name in ("source", "target")
        ]
        seconds: dict[tuple[int, int], list[float]] = {}
        copies = _copies(sources, targets) if device == "cpu" else {}
        described = [await source.memory.blocks.describe(source.blocks) for source in sources]
        for _ in range(rounds + 1):
            for i, source in enumerate(sources):
                for j, target in enumerate(targets):
                    peer = await target.exchange.connect(source.address)
                    read = await _timed(target, peer, described[i])
                    seconds.setdefault((i, j), []).append(read)
                    if copies:
                        copies[i, j].time()
        nbytes = NUM_BLOCKS * sources[0].memory.engine.layout.block_nbytes
    return [
        row
        for i, source_plan in enumerate(plans)
        for j, target_plan in enumerate(plans)
        for row in _pair_rows(
            f"{source_plan} → {target_plan}",
            nbytes,
            seconds[i, j][1:],
            copies[i, j].took_s[1:] if copies else [],
            seconds[j, j][1:] if i != j else [],
        )
    ]


def _copies(sources: Sequence[Side], targets: Sequence[Side]) -> dict[tuple[int, int], RunCopy]:
    """As many bytes in as many places, so that the caches hold as much of them."""
    here, there = ([Pools(side.memory, NUM_BLOCKS) for side in sides] for sides in (targets, sources))
    return {
        (i, j): RunCopy(source, target, NUM_BLOCKS)
        for i, source in enumerate(there)
        for j, target in enumerate(here)
    }


def _pair_rows(
    case: str, nbytes: int, took_s: Sequence[float], copied_s: Sequence[float], equal_s: Sequence[float]
) -> list[Row]:
    """took_s: of the pair; copied_s: of its bound, none on GPUs; equal_s: between plans equal to the
    target's, none where they are."""
    seconds = statistics.median(took_s)
    row = Row(case, BLOCKS, nbytes / seconds / 1e9, "GB/s")
    if equal_s:
        row = replace(row, limit="at least", limit_value=GOAL)
        row = report.versus(row, "equal plans", nbytes / statistics.median(equal_s) / 1e9)
    p50, p95, p99 = np.quantile(took_s, (0.5, 0.95, 0.99)).tolist()
    rows = [row, Row(case, SECONDS, seconds, "s", p50=p50, p95=p95, p99=p99)]
    if copied_s:
        rows.append(Row(case, BOUND, nbytes / statistics.median(copied_s) / 1e9, "GB/s"))
    return rows


async def _timed(target: Side, peer: KvSource, blocks: node_pb2.BlockSpans) -> float:
    began_s = time.perf_counter()
    await target.exchange.read(peer, blocks, 0, target.blocks, deadline_s=_DEADLINE_S)
    return time.perf_counter() - began_s
