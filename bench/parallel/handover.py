"""Blocks from the ranks of one plan to those of another, beside blocks between equal plans."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench import report
from bench.parallel.run_copy import Pools, RunCopy
from bench.report import Row
from engine.kv_exchange import KvExchange, KvSource
from engine.node_memory import NodeMemory
from engine.parallel.plan import ParallelPlan
from protos import node_pb2
from runtime.options import Config, EngineOptions, ModelOptions, ParallelOptions
from transfer import TransferAgent

BLOCK_TOKENS = 64
NUM_BLOCKS = 96
BLOCKS = f"blocks of {BLOCK_TOKENS} tokens"
BOUND = "as many runs copied and checksummed in one process"
# Of the bandwidth between equal plans.
GOAL = 0.7
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Side:
    memory: NodeMemory
    exchange: KvExchange
    address: node_pb2.KvAddress
    blocks: list[int]


@asynccontextmanager
async def side(model: Path, name: str, plan: ParallelPlan) -> AsyncIterator[Side]:
    options = EngineOptions(
        block_size=BLOCK_TOKENS,
        pool_nbytes=(64 << 20) * plan.cp,
        parallel=ParallelOptions(tp=plan.tp, pp=plan.pp, cp=plan.cp),
    )
    config = Config()
    # As between nodes: the leaders of both sides are one process here, which no two nodes are.
    transfer = replace(config.transfer, transports=("shm", "tcp"))
    model_options = ModelOptions(path=str(model), device="cpu")
    config = replace(config, engine=options, model=model_options, transfer=transfer)
    async with await TransferAgent.start(config.transfer, agent_id=name, epoch=1) as agent:
        memory = await NodeMemory.open(config, agent, lambda *_: None)
        layout = memory.engine.layout
        exchange = KvExchange(
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
            yield Side(memory, exchange, address, memory.engine.pool.allocate(NUM_BLOCKS))
        finally:
            await memory.engine.close()
            memory.blocks.close()


async def measure(model: Path, plans: Sequence[ParallelPlan], rounds: int) -> list[Row]:
    """For each pair, in turn in each round: its blocks, checksums verified; and what bounds them."""
    async with AsyncExitStack() as stack:
        sources, targets = [
            [await stack.enter_async_context(side(model, f"{name} {plan}", plan)) for plan in plans]
            for name in ("source", "target")
        ]
        seconds: dict[tuple[int, int], list[float]] = {}
        # As many bytes in as many places, so that the caches hold as much of them.
        here, there = ([Pools(side.memory, NUM_BLOCKS) for side in sides] for sides in (targets, sources))
        copies = {
            (i, j): RunCopy(source, target, NUM_BLOCKS)
            for i, source in enumerate(there)
            for j, target in enumerate(here)
        }
        described = [await source.memory.blocks.describe(source.blocks) for source in sources]
        for _ in range(rounds + 1):
            for i, source in enumerate(sources):
                for j, target in enumerate(targets):
                    peer = await target.exchange.connect(source.address)
                    read = await _timed(target, peer, described[i])
                    seconds.setdefault((i, j), []).append(read)
                    copies[i, j].time()
        nbytes = NUM_BLOCKS * sources[0].memory.engine.layout.block_nbytes
    rate = {pair: nbytes / statistics.median(took[1:]) / 1e9 for pair, took in seconds.items()}
    rows = []
    for (i, j), value in rate.items():
        case = f"{plans[i]} → {plans[j]}"
        row = Row(case, BLOCKS, value, "GB/s")
        if i != j:
            row = replace(row, limit="at least", limit_value=GOAL)
            row = report.versus(row, "equal plans", rate[j, j])
        copied = nbytes / statistics.median(copies[i, j].took_s[1:]) / 1e9
        rows += [row, Row(case, BOUND, copied, "GB/s")]
    return rows


async def _timed(target: Side, peer: KvSource, blocks: node_pb2.BlockSpans) -> float:
    began_s = time.perf_counter()
    await target.exchange.read(peer, blocks, 0, target.blocks, deadline_s=_DEADLINE_S)
    return time.perf_counter() - began_s
