"""Prompts computed by ranks of one plan and continued by ranks of another."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import xxhash

from moonpool.engine.node.engine_memory import EngineMemory
from moonpool.engine.prefix_cache.peer_exchange import PeerExchange, PeerIncompatible
from moonpool.kvstore.remote.rank_reader import RankRead
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import (
    Config,
    EngineOptions,
    ModelOptions,
    ParallelOptions,
    TransferOptions,
)
from moonpool.transfer import ChecksumMismatch, RegionError, TransferAgent
from tests.engine.conftest import Driver, Result
from tests.engine.ranks.conftest import TIMEOUT_S
from tests.engine.ranks.test_exact import FAMILIES, SHAPE
from tests.processes import stop

PLANS = [*itertools.product((1, 2), (1, 2)), (1, 1, 2), (2, 1, 2)]  # tp, pp, cp
NUM_TOKENS = 12
# Of reads and writes that a busy machine delays.
PATIENT = TransferOptions(deadline_s=60.0)


class Side:
    """Half a node: an engine, its blocks, and what reads into them and describes them."""

    def __init__(self, memory: EngineMemory, agent: TransferAgent) -> None:
        self.memory = memory
        self.agent = agent
        self.driver = Driver(memory.engine)
        self.exchange = PeerExchange(
            memory.blocks,
            agent,
            deadline_s=PATIENT.deadline_s,
            reader=memory.reader,
            in_parts=bool(memory.ranks),
        )
        layout = memory.engine.layout
        self.address = node_pb2.KvAddress(
            node_id=agent.agent_id,
            agent=agent.describe().pack(),
            layout_fingerprint=layout.fingerprint,
            layout=str(layout),
            block_nbytes=layout.block_nbytes,
            ranks=memory.ranks,
        )

    async def prefill(self, prompt: list[int]) -> tuple[Any, int]:
        sequence = self.driver.sequence(prompt, max_tokens=NUM_TOKENS)
        (result,) = await self.driver.run(sequence, prefill_only=True)
        return sequence, result.token_ids[0]

    async def read(self, source: Side, theirs: Any) -> Any:
        """A sequence of our own with the blocks of theirs, all of them read."""
        engine = self.memory.engine
        ours = self.driver.sequence(theirs.token_ids[: theirs.num_prompt_tokens], max_tokens=NUM_TOKENS)
        assert engine.reserve(ours)
        assert ours.num_computed_tokens == 0
        spans = await source.memory.blocks.describe(theirs.block_table)
        peer = await self.exchange.connect(source.address)
        num_blocks = len(theirs.block_table)
        blocks = ours.block_table[:num_blocks]
        report = await self.exchange.read(peer, spans, 0, blocks, deadline_s=PATIENT.deadline_s)
        # With copies of KV heads on several tp ranks, all of them.
        nbytes = sum(layout.block_nbytes for layout in engine.rank_layouts) // engine.plan.cp
        assert report.nbytes == num_blocks * nbytes
        return ours

    async def decode(self, sequence: Any, first: int) -> list[int]:
        engine = self.memory.engine
        engine.seal_received(sequence, sequence.num_tokens)
        sequence.append(first)
        # The driver counts from the first token on, which came from elsewhere.
        self.driver.results[sequence.key] = Result(token_ids=[first])
        (result,) = await self.driver.run(sequence)
        return result.token_ids


@asynccontextmanager
async def side(
    path: Path,
    name: str,
    tp: int,
    pp: int,
    cp: int = 1,
    *,
    separate_pools: bool = False,
    config: Config | None = None,
    device: str = "cpu",
    **words: Any,
) -> AsyncIterator[Side]:
    """``separate_pools``: see ``RankGroup``. ``config``: of all but the engine and the model.
    Other words are EngineOptions' and ParallelOptions'."""
    more = {word: words.pop(word) for word in list(words) if word in ParallelOptions.__slots__}
    more.setdefault("timeout_s", TIMEOUT_S)
    parallel = ParallelOptions(tp=tp, pp=pp, cp=cp, cp_min_tokens=1, **more)
    options = EngineOptions(**{"block_size": 8, "pool_nbytes": 4 << 20, "parallel": parallel, **words})
    model = ModelOptions(path=str(path), device=device, dtype="float32")
    config = replace(config or Config(transfer=PATIENT), engine=options, model=model)
    async with await TransferAgent.start(config.transfer, agent_id=name, epoch=1) as agent:
        with patch("moonpool.engine.execution.cost_profile._BUDGET_S", 0.02):
            memory = await EngineMemory.open(config, agent, lambda *_: None, separate_pools=separate_pools)
        try:
            yield Side(memory, agent)
        finally:
            await memory.engine.close()
            await memory.blocks.close()


def prompt(seed: int, n: int = 43) -> list[int]:
    return np.random.default_rng(seed).integers(0, 160, n).tolist()


async def continues_exactly(reference: Any, source: Side, target: Side, seed: int, n: int = 43) -> None:
    tokens = prompt(seed, n)
    theirs, first = await source.prefill(tokens)
    ours = await target.read(source, theirs)
    got = await target.decode(ours, first)
    source.memory.engine.release(theirs)
    assert got == reference.greedy(tokens, NUM_TOKENS)


@pytest.mark.slow
async def test_every_plan_continues_what_every_plan_began(make_checkpoint) -> None:
    reference = make_checkpoint("qwen3", **SHAPE)
    async with AsyncExitStack() as stack:
        sides = [
            [
                await stack.enter_async_context(
                    side(reference.path, "-".join((name, *map(str, plan))), *plan)
                )
                for plan in PLANS
            ]
            for name in ("prefill", "decode")
        ]
        for seed, (source, target) in enumerate(itertools.product(*sides)):
            await continues_exactly(reference, source, target, seed)


async def test_other_plans_continue_exactly_and_whole_blocks_come_out(make_checkpoint) -> None:
    reference = make_checkpoint("llama", **SHAPE)
    async with (
        side(reference.path, "tensor", 2, 1) as tensor,
        side(reference.path, "pipeline", 1, 2) as pipeline,
        side(reference.path, "alone", 1, 1) as alone,
    ):
        pairs = itertools.permutations((tensor, pipeline, alone), 2)
        for seed, (source, target) in enumerate(pairs):
            await continues_exactly(reference, source, target, seed)

        # What leaves the pool is the same whatever the plan, and goes back into any.
        sequences = [await one.prefill(prompt(99)) for one in (tensor, pipeline, alone)]
        blocks = []
        for one, (sequence, _) in zip((tensor, pipeline, alone), sequences, strict=True):
            block = np.empty(one.memory.engine.layout.block_nbytes, np.uint8)
            first = sequence.block_table[0]
            assert one.memory.blocks.bytes.copy_out([first], [block]) == [one.memory.blocks.checksum(first)]
            assert (one.memory.blocks.bytes.view(first) == block).all()
            blocks.append(block.view(np.float32))
        np.testing.assert_allclose(blocks[0], blocks[2], atol=1e-5)
        np.testing.assert_allclose(blocks[1], blocks[2], atol=1e-5)
        bytes_, (sequence, _) = tensor.memory.blocks.bytes, sequences[0]
        source = blocks[2].view(np.uint8)
        checksum = alone.memory.blocks.checksum(sequences[2][0].block_table[0])
        assert bytes_.copy_in([source], sequence.block_table[:1], [checksum]) is None
        assert (bytes_.view(sequence.block_table[0]) == source).all()
        assert bytes_.copy_in([source], sequence.block_table[:1], [checksum ^ 1]) == 0


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
async def test_every_family_is_continued_exactly(make_checkpoint, name, tp) -> None:
    family, words = FAMILIES[name]
    reference = make_checkpoint(family, **SHAPE | words)
    async with (
        side(reference.path, "source", 1, 1) as source,
        side(reference.path, "target", tp, 1) as target,
    ):
        await continues_exactly(reference, source, target, 1)
        await continues_exactly(reference, target, source, 2)


@pytest.mark.parametrize("separate_pools", [False, True], ids=["shared", "apart"])
async def test_blocks_that_cp_ranks_split_go_to_other_plans_and_come_back(
    make_checkpoint, separate_pools: bool
) -> None:
    """Each block is on one of them, whole or in parts on its tp ranks."""
    reference = make_checkpoint("qwen3", **SHAPE)
    path = reference.path
    async with (
        side(path, "context", 1, 1, 2, separate_pools=separate_pools) as context,
        side(path, "tensor", 2, 1) as tensor,
        side(path, "alone", 1, 1) as alone,
    ):
        pairs = [pair for pair in itertools.permutations((context, tensor, alone), 2) if context in pair]
        for seed, (source, target) in enumerate(pairs):
            await continues_exactly(reference, source, target, seed)

        # What comes from outside the pool and leaves it again.
        memory = context.memory
        num_blocks, nbytes = memory.engine.pool.num_blocks, memory.engine.layout.block_nbytes
        where = [7, 2, 3, num_blocks - 1]
        blocks = list(np.random.default_rng(0).integers(0, 256, (len(where), nbytes), np.uint8))
        sums = [xxhash.xxh3_64_intdigest(block.data) for block in blocks]
        assert await asyncio.to_thread(memory.blocks.bytes.copy_in, blocks, where, sums) is None
        assert await memory.blocks.hash(where) == sums
        copies = [np.empty_like(block) for block in blocks]
        assert await asyncio.to_thread(memory.blocks.bytes.copy_out, where, copies) == sums
        assert all((copy == block).all() for copy, block in zip(copies, blocks, strict=True))
        ours = memory.engine.pool_tensor.numpy()
        assert len(ours) == num_blocks // 2
        assert (ours[1] == blocks[1]).all()
        if not separate_pools:
            theirs = memory.engine.ranks.pools[0].reshape(-1, nbytes)
            assert len(theirs) == num_blocks // 2
            assert (theirs[3] == blocks[0]).all()
            assert (theirs[-1] == blocks[3]).all()


async def test_blocks_of_the_pool_and_of_host_memory_come_in_one_read(make_checkpoint) -> None:
    reference = make_checkpoint("qwen2", **SHAPE)
    tokens = prompt(5)
    async with (
        side(reference.path, "tensor", 2, 1) as source,
        side(reference.path, "pipeline", 1, 2) as target,
    ):
        theirs, first = await source.prefill(tokens)
        spans = await source.memory.blocks.describe(theirs.block_table)
        # As a lease names them: some are in the pool, in parts, others whole in host memory.
        nbytes = source.memory.engine.layout.block_nbytes
        host = source.agent.allocate(8 * nbytes, "host")
        for i, slot in ((1, 3), (2, 0), (4, 7)):
            place = host.array[slot * nbytes : (slot + 1) * nbytes]
            source.memory.blocks.bytes.copy_out([theirs.block_table[i]], [place])
            spans.region[i], spans.offset[i] = host.id, slot * nbytes
        described = source.memory.blocks.describe

        async def leased(block_ids: list[int]) -> node_pb2.BlockSpans:
            return spans

        source.memory.blocks.describe = leased  # type: ignore[method-assign]
        ours = await target.read(source, theirs)
        source.memory.blocks.describe = described  # type: ignore[method-assign]
        assert await target.decode(ours, first) == reference.greedy(tokens, NUM_TOKENS)


async def test_a_fetch_takes_no_block_that_running_sequences_grow_into(make_checkpoint) -> None:
    reference = make_checkpoint("llama", **SHAPE)
    async with side(reference.path, "source", 1, 1) as source, side(reference.path, "target", 1, 1) as target:
        theirs, _ = await target.prefill(prompt(6))
        target.memory.engine.release(theirs)
        pool = target.memory.blocks.pool
        whole = theirs.keys[: pool.num_free]
        assert pool.num_idle(pool.match(whole)) > 0
        pool.num_growing = lambda: pool.num_free
        num_free = pool.num_free
        assert (await target.exchange.fetch(source.address, whole)).block_ids == []
        assert pool.num_free == num_free


async def test_replicated_kv_heads_reach_all_their_ranks(make_checkpoint) -> None:
    reference = make_checkpoint("llama", **SHAPE | {"num_key_value_heads": 1})
    async with side(reference.path, "two", 2, 1) as two, side(reference.path, "one", 1, 1) as one:
        await continues_exactly(reference, two, one, 1)
        await continues_exactly(reference, one, two, 2)


async def test_what_cannot_be_converted_is_refused_by_name_and_wrong_bytes_are_noticed(
    make_checkpoint,
) -> None:
    path = make_checkpoint("llama", **SHAPE).path
    async with (
        side(path, "small", 2, 1) as small,
        side(path, "large", 1, 1, block_size=16) as large,
        side(path, "same", 1, 1) as same,
    ):
        with pytest.raises(PeerIncompatible, match="small has KV blocks of layout 3 layers × 2 KV heads"):
            await large.exchange.connect(small.address)
        theirs, _ = await small.prefill(prompt(3))
        pool = small.memory.engine.ranks.pools[0]
        described = small.memory.blocks.describe

        async def describe_then_spoil(block_ids: list[int]) -> node_pb2.BlockSpans:
            spans = await described(block_ids)
            pool[theirs.block_table[1] * small.memory.engine.rank_layouts[1].block_nbytes] ^= 1
            return spans

        small.memory.blocks.describe = describe_then_spoil  # type: ignore[method-assign]
        with pytest.raises(ChecksumMismatch, match="span 1: checksum"):
            await same.read(small, theirs)
        # An error in a rank is the same error here.
        group, agent = small.memory.engine.ranks, same.agent.describe().pack()
        with pytest.raises(RegionError, match="rank 1: region 1234") as raised:
            await group.ranks[0].read(RankRead(agent, 1234, [0], [0], [(0, 0, 64)], PATIENT.deadline_s))
        assert raised.value.region_id == 1234


@pytest.mark.parametrize("num_cancellations", [1, 2])
async def test_a_read_that_is_cancelled_before_its_rank_begins_it_ends(
    make_checkpoint, num_cancellations: int
) -> None:
    """As where the read of another rank fails at once: the rank gets both commands together."""
    async with side(make_checkpoint("llama", **SHAPE).path, "two", 2, 1) as two:
        (rank,), agent = two.memory.engine.ranks.ranks, two.agent.describe().pack()
        request = RankRead(agent, 1234, [0], [0], [(0, 0, 64)], PATIENT.deadline_s)
        stop(rank.pid)
        try:
            reading = asyncio.create_task(rank.read(request))
            await asyncio.sleep(0)
            for _ in range(num_cancellations):
                reading.cancel()
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not reading.done(), "the rank may still write"
        finally:
            os.kill(rank.pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reading, 60)
        with pytest.raises(RegionError, match="region 1234"):
            await rank.read(request)
