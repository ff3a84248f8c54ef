"""Ranks whose pools their leader cannot map: what it saves, loads, hands over and loses is as with others."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moonpool.engine.errors import RankLost
from moonpool.engine.memory.remote_rank_bytes import RemoteRankBytes
from moonpool.engine.prefix_cache.store import NodeStore
from moonpool.engine.ranks.rank_listener import RankListener
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import (
    Config,
    HostTierOptions,
    ParallelOptions,
    SecurityOptions,
    SsdTierOptions,
    StoreOptions,
    TransferOptions,
)
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import Caller
from moonpool.runtime.service.child import Child
from moonpool.transfer import ChecksumMismatch, DeadlineExceeded, checksum
from tests.engine.late_device import LateDevice
from tests.engine.ranks.conftest import TIMEOUT_S
from tests.engine.ranks.test_exact import SHAPE
from tests.engine.ranks.test_handover import NUM_TOKENS, PATIENT, Side, continues_exactly, prompt, side
from tests.engine.ranks.test_hosts import SECRET, far_rank
from tests.processes import stop

PLANS = [
    pytest.param(1, 2, id="pp2"),
    pytest.param(2, 1, id="tp2", marks=pytest.mark.slow),
    pytest.param(2, 2, id="tp2-pp2", marks=pytest.mark.slow),
]
NUM_BLOCKS = 12
POOL_NBYTES = NUM_BLOCKS * 3 * 2 * 2 * 8 * 16 * 4  # layers, K and V, KV heads, tokens, dims, float32


def random_blocks(of: Side, n: int, seed: int = 0) -> list[Any]:
    nbytes = of.memory.engine.layout.block_nbytes
    return list(np.random.default_rng(seed).integers(0, 256, (n, nbytes), np.uint8))


def chain(of: Side, tokens: list[int]) -> list[BlockKey]:
    sequence = of.driver.sequence(tokens)
    sequence.hash_blocks(8, len(tokens) // 8)
    return sequence.keys


@asynccontextmanager
async def storing(of: Side, config: Config) -> AsyncIterator[NodeStore]:
    memory = of.memory
    store = await NodeStore.open(config, "node", of.agent, memory.engine, memory.blocks, lambda *_: None)
    try:
        yield store
    finally:
        await memory.engine.halt()
        await store.close(60.0)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), PLANS)
async def test_blocks_come_and_go_as_with_shared_pools_and_one_process(make_checkpoint, tp, pp) -> None:
    path = make_checkpoint("llama", **SHAPE).path
    async with AsyncExitStack() as stack:
        sides = [
            await stack.enter_async_context(side(path, name, *plan, separate_pools=name == "apart"))
            for name, plan in (("apart", (tp, pp)), ("shared", (tp, pp)), ("alone", (1, 1)))
        ]
        apart = sides[0]
        assert isinstance(apart.memory.blocks.bytes, RemoteRankBytes)
        assert not apart.memory.engine.ranks.pools
        blocks = random_blocks(apart, 5)
        sums = [checksum(block.data) for block in blocks]
        where = [3, 1, 7, 2, 9]
        # Memory that ranks' agents reach, and other memory.
        nbytes = apart.memory.engine.layout.block_nbytes
        region = apart.agent.allocate(5 * nbytes, "host")
        registered = list(region.array.reshape(5, nbytes))
        for into in (registered, [np.empty(nbytes, np.uint8) for _ in blocks]):
            for one in sides:
                bytes_, ids = one.memory.blocks.bytes, [block + 1 for block in where]
                for given, block in zip(into, blocks, strict=True):
                    given[:] = block
                assert await asyncio.to_thread(bytes_.copy_in, into, ids, sums) is None
                assert await one.memory.blocks.hash(ids) == sums
                for given in into:
                    given[:] = 0
                assert await asyncio.to_thread(bytes_.copy_out, ids, into) == sums
                assert all(np.array_equal(a, b) for a, b in zip(into, blocks, strict=True))
                spoilt = [sums[0], sums[1], sums[2] ^ 1, sums[3], sums[4]]
                assert await asyncio.to_thread(bytes_.copy_in, into, ids, spoilt) == 2
        assert await asyncio.to_thread(apart.memory.blocks.bytes.copy_out, [], []) == []


@pytest.mark.slow
async def test_more_blocks_than_staging_holds_pass_through_it(make_checkpoint, monkeypatch) -> None:
    path = make_checkpoint("llama", **SHAPE).path
    monkeypatch.setattr("moonpool.engine.memory.remote_rank_bytes.STAGING_NBYTES", 1)
    async with side(path, "apart", 1, 2, separate_pools=True) as apart:
        bytes_, blocks = apart.memory.blocks.bytes, random_blocks(apart, 3)
        sums = [checksum(block.data) for block in blocks]
        assert await asyncio.to_thread(bytes_.copy_in, blocks, [4, 0, 2], sums) is None
        assert await asyncio.to_thread(bytes_.copy_in, blocks, [4, 0, 2], [*sums[:2], 0]) == 2
        copies = [np.empty_like(block) for block in blocks]
        assert await asyncio.to_thread(bytes_.copy_out, [4, 0, 2], copies) == sums
        assert (await asyncio.to_thread(bytes_.view, 2) == blocks[2]).all()
        assert await apart.memory.blocks.checksums([0, 2]) == sums[1:]


# Of two ranks that have the whole latents of their layers: elements, tokens, float32.
LATENTS = ("deepseek_v3", {"num_key_value_heads": 8}, 2 * NUM_BLOCKS * 3 * (8 + 32) * 8 * 4)
SAVED = [
    pytest.param(("qwen3", {}, POOL_NBYTES), *plan.values, id=plan.id, marks=plan.marks) for plan in PLANS
]


@pytest.mark.parametrize(
    ("model", "tp", "pp"), [*SAVED, pytest.param(LATENTS, 2, 1, id="latents", marks=pytest.mark.slow)]
)
async def test_what_they_save_any_plan_loads(make_checkpoint, tmp_path, model, tp, pp) -> None:
    """By way of host memory, and of disk in another life."""
    family, words, pool_nbytes = model
    reference = make_checkpoint(family, **SHAPE | words)
    tokens = prompt(7, 61)
    expected = reference.greedy(tokens, NUM_TOKENS)
    config = replace(
        Config(),
        store=StoreOptions(
            host=HostTierOptions(capacity_nbytes=4 << 20),
            ssd=SsdTierOptions(path=str(tmp_path), capacity_nbytes=64 << 20, deadline_s=60.0),
        ),
    )
    contents: list[list[Any]] = []
    lives = [("apart", tp, pp), ("alone", 1, 1), ("shared", tp, pp), ("apart again", tp, pp)]
    for name, *plan in lives:
        apart = name.startswith("apart")
        async with (
            side(
                reference.path, "node", *plan, separate_pools=apart, config=config, pool_nbytes=pool_nbytes
            ) as one,
            storing(one, config) as store,
        ):
            keys, pool = chain(one, tokens), one.memory.engine.pool
            if name == lives[0][0]:
                (result,) = await one.driver.run(one.driver.sequence(tokens, max_tokens=NUM_TOKENS))
                assert result.token_ids == expected
                held = pool.match(keys)
                contents.append([await asyncio.to_thread(one.memory.blocks.bytes.view, b) for b in held])
                await one.driver.run(one.driver.sequence(prompt(8, NUM_BLOCKS * 8 - 3), max_tokens=1))
                await store.tiers.copied()
                assert set(store.tiers.match(keys)) == {Tier.HOST}
            else:
                assert set(store.tiers.match(keys)) == {Tier.SSD}
            # In parts: to be sure that what is worth loading is not a matter of time here.
            store.loader._num_worth_it = lambda tiers, slowest: len(tiers)
            loaded = await store.loader.load(keys, store.tiers.match(keys))
            assert len(loaded.block_ids) == len(keys) == 7
            view = one.memory.blocks.bytes.view
            contents.append([await asyncio.to_thread(view, b) for b in loaded.block_ids])
            pool.release(loaded.block_ids)
            (result,) = await one.driver.run(one.driver.sequence(tokens, max_tokens=NUM_TOKENS))
            assert result.token_ids == expected
    for content in contents[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(content, contents[0], strict=True))


async def test_prompts_continue_exactly_between_ranks_with_separate_pools(make_checkpoint) -> None:
    reference = make_checkpoint("llama", **SHAPE)
    network = replace(Config(), transfer=TransferOptions(transports=("local", "tcp")))
    async with (
        side(reference.path, "apart", 1, 2, separate_pools=True) as apart,
        side(reference.path, "far", 2, 1, separate_pools=True, config=network) as far,
        side(reference.path, "alone", 1, 1) as alone,
    ):
        for seed, (source, target) in enumerate(itertools.permutations((apart, far, alone), 2)):
            await continues_exactly(reference, source, target, seed)

        # What changes after its checksum was told is noticed by whoever reads it, whole or in parts.
        for seed, (source, target) in enumerate(itertools.permutations((apart, alone), 2)):
            theirs, _ = await source.prefill(prompt(50 + seed))
            described = source.memory.blocks.describe

            async def describe_then_spoil(ids, source=source, described=described) -> node_pb2.BlockSpans:
                spans, bytes_ = await described(ids), source.memory.blocks.bytes
                spoilt = random_blocks(source, 1)
                await asyncio.to_thread(bytes_.copy_in, spoilt, [ids[2]], [checksum(spoilt[0].data)])
                return spans

            source.memory.blocks.describe = describe_then_spoil  # type: ignore[method-assign]
            with pytest.raises(ChecksumMismatch, match="span 2: checksum"):
                await target.read(source, theirs)
            source.memory.blocks.describe = described  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
async def test_every_plan_with_separate_pools_continues_prompts_of_any(make_checkpoint, family) -> None:
    reference = make_checkpoint(family, **SHAPE)
    async with AsyncExitStack() as stack:
        sides = [
            await stack.enter_async_context(
                side(reference.path, f"{tp}-{pp}-{apart}", tp, pp, separate_pools=apart)
            )
            for tp, pp, apart in ((1, 2, True), (2, 1, True), (2, 2, True), (2, 2, False), (1, 1, False))
        ]
        for seed, (source, target) in enumerate(itertools.permutations(sides, 2)):
            await continues_exactly(reference, source, target, seed)


class Listener(RankListener):
    """Says when it is open."""

    def open(self) -> None:
        super().open()
        self.opened.set()


@asynccontextmanager
async def two_machines(
    path: Any, monkeypatch: pytest.MonkeyPatch, tp: int, **words: Any
) -> AsyncIterator[tuple[Side, list[Child]]]:
    """A node whose second stage is on another machine, and which reaches that by TCP only."""
    before = process.current()
    process.use(process.Security(SecurityOptions(cluster_key=SECRET), Caller("node", "near")))
    transfer = TransferOptions(transports=("local", "tcp"), deadline_s=PATIENT.deadline_s)
    far = {"hosts": 2, "listen": "127.0.0.1:0", **words}
    options = ParallelOptions(tp=tp, pp=2, hosts=2, listen="127.0.0.1:0")
    listener = Listener(options, "near")
    listener.opened = asyncio.Event()
    monkeypatch.setattr(
        "moonpool.engine.node.engine_memory.RankListener.from_options",
        lambda options, *_: listener if options.hosts > 1 else None,
    )
    config = replace(Config(), transfer=transfer)

    async def come() -> list[Child]:
        await listener.opened.wait()
        by_tcp = "transfer.transports=local,tcp"
        children = [far_rank(listener.port, options, rank, None, by_tcp) for rank in range(tp)]
        for child in children:
            await child.start()
        return children

    coming = asyncio.create_task(come())
    try:
        async with side(path, "far", tp, 2, config=config, **far) as one:
            yield one, await coming
    finally:
        for child in await coming:
            child.kill()
            await child.wait()
        process.use(before)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
async def test_ranks_of_another_machine_have_separate_pools(make_checkpoint, monkeypatch, tp) -> None:
    reference = make_checkpoint("llama", **SHAPE)
    peers = Config()
    async with (
        two_machines(reference.path, monkeypatch, tp) as (far, (rank, *_)),
        side(reference.path, "alone", 1, 1, config=peers) as alone,
        side(reference.path, "tensor", 2, 1, config=peers) as tensor,
    ):
        assert any(rank.where for rank in far.memory.engine.ranks.ranks)
        for seed, (source, target) in enumerate(((far, alone), (alone, far), (far, tensor), (tensor, far))):
            await continues_exactly(reference, source, target, seed)
        bytes_, blocks = far.memory.blocks.bytes, random_blocks(far, 40)
        sums, ids = [checksum(block.data) for block in blocks], list(range(40))
        copies = [np.empty_like(block) for block in blocks]
        assert await asyncio.to_thread(bytes_.copy_in, blocks, ids, sums) is None
        assert await asyncio.to_thread(bytes_.copy_out, ids, copies) == sums

        def saving_and_loading() -> None:
            while True:
                bytes_.copy_out(ids, copies)
                bytes_.copy_in(blocks, ids, sums)

        calls = [asyncio.ensure_future(asyncio.to_thread(saving_and_loading)) for _ in range(2)]
        await asyncio.sleep(0.3)
        os.kill(rank.pid, signal.SIGKILL)
        began_s = time.monotonic()
        for call in calls:
            with pytest.raises(MoonpoolError):
                await call
        with pytest.raises(RankLost):
            await far.memory.engine.wait()
        assert time.monotonic() - began_s < 40  # not for as long as a copy may take


@pytest.mark.slow
async def test_a_block_gone_bad_in_host_memory_is_not_loaded(make_checkpoint) -> None:
    path = make_checkpoint("llama", **SHAPE).path
    config = replace(Config(), store=StoreOptions(host=HostTierOptions(capacity_nbytes=4 << 20)))
    async with (
        side(path, "apart", 1, 2, separate_pools=True, pool_nbytes=POOL_NBYTES) as one,
        storing(one, config) as store,
    ):
        tokens = prompt(1, 41)
        await one.driver.run(one.driver.sequence(tokens, max_tokens=1))
        await one.driver.run(one.driver.sequence(prompt(2, NUM_BLOCKS * 8 - 3), max_tokens=1))
        await store.tiers.copied()
        keys, host = chain(one, tokens), store.tiers.host
        host.bytes_of(host.slot_of(keys[2]))[5] ^= 1
        store.loader._num_worth_it = lambda tiers, slowest: len(tiers)
        loaded = await store.loader.load(keys, store.tiers.match(keys))
        assert len(loaded.block_ids) == 2
        assert len(store.tiers.match(keys)) == 2
        pool = one.memory.engine.pool
        pool.release(loaded.block_ids)
        assert pool.evict(keys[1])

        # What cannot be reached in time is computed instead.
        def late(*_: Any) -> int | None:
            raise DeadlineExceeded("apart/1", 1.0, "a write")

        await store.tiers.copied()
        one.memory.blocks.bytes.copy_in = late
        loaded = await store.loader.load(keys, store.tiers.match(keys))
        assert loaded.num_host == 0
        one.memory.engine.pool.release(loaded.block_ids)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_a_rank_lost_in_the_middle_of_a_copy_ends_it(make_checkpoint, how) -> None:
    path = make_checkpoint("llama", **SHAPE).path
    # A stopped rank is lost when it has been silent for so long. The end of a process is noticed at once.
    timeout_s = 5.0 if how is signal.SIGSTOP else TIMEOUT_S
    async with side(path, "apart", 2, 1, separate_pools=True, timeout_s=timeout_s) as apart:
        bytes_, blocks = apart.memory.blocks.bytes, random_blocks(apart, 40)
        for call in (bytes_.view, lambda block: bytes_.checksums([block]), apart.memory.blocks.checksum):
            with pytest.raises(AssertionError, match="would wait for itself"):
                call(0)
        sums, ids = [checksum(block.data) for block in blocks], list(range(40))
        copies = [np.empty_like(block) for block in blocks]
        loop, under_way = asyncio.get_running_loop(), asyncio.Event()

        def saving() -> None:
            while True:
                bytes_.copy_out(ids, copies)
                loop.call_soon_threadsafe(under_way.set)

        def loading() -> None:
            while True:
                bytes_.copy_in(blocks, ids, sums)

        (rank,) = apart.memory.engine.ranks.ranks
        calls = [asyncio.ensure_future(asyncio.to_thread(call)) for call in (saving, saving, loading)]
        async with asyncio.timeout(60):
            await under_way.wait()
        os.kill(rank.pid, how)
        began_s = time.monotonic()
        # Reads do not disturb a stopped one; they end, as writes do, when it is lost.
        for call in calls:
            with pytest.raises(MoonpoolError):
                await call
        assert time.monotonic() - began_s < 30  # not for as long as a copy may take
        with pytest.raises(RankLost):  # copies may hear of the connection's end before the group does
            await apart.memory.engine.wait()
        with pytest.raises(RankLost):
            await apart.memory.blocks.checksums([0])


async def test_closing_ends_copies_under_way(make_checkpoint) -> None:
    path = make_checkpoint("llama", **SHAPE).path
    config = replace(Config(), store=StoreOptions(host=HostTierOptions(capacity_nbytes=4 << 20)))
    async with side(path, "apart", 1, 2, separate_pools=True, pool_nbytes=POOL_NBYTES) as one:
        store = await NodeStore.open(
            config, "", one.agent, one.memory.engine, one.memory.blocks, lambda *_: 0
        )
        await one.driver.run(one.driver.sequence(prompt(1, 80), max_tokens=1))
        (rank,) = one.memory.engine.ranks.ranks
        keys = chain(one, prompt(1, 80))
        host = [np.zeros(one.memory.engine.layout.block_nbytes, np.uint8)] * 2
        stop(rank.pid)
        # A write that waits for a stopped rank, blocks on their way to host memory, and a lease being hashed.
        loading = asyncio.create_task(one.memory.blocks.copy_in(host, [10, 11], [0, 0]))
        pinning = asyncio.create_task(store.tiers.pin(keys[:3], 1.0))
        await asyncio.sleep(0)
        assert all(one.memory.engine.pool.evict(key) for key in reversed(keys[3:]))
        assert store.tiers.demoter.demoting
        began_s = time.monotonic()
        await one.memory.engine.halt()
        await store.close(1.0)
        await one.memory.engine.close()
        await one.memory.blocks.close()
        assert time.monotonic() - began_s < 40  # not for as long as a copy may take
        for task in (loading, pinning):
            await asyncio.wait((task,))
            task.exception()


async def test_a_device_with_memory_and_queues_of_its_own_leads_ranks(make_checkpoint, monkeypatch) -> None:
    """As a GPU does, whose steps are recorded where it is alone; here none is."""
    reference = make_checkpoint("llama", **SHAPE)
    device = LateDevice()
    async with side(reference.path, "alone", 1, 1) as alone:
        monkeypatch.setattr("moonpool.engine.setup.choose_device", lambda option: device)
        async with side(reference.path, "late", 1, 2, separate_pools=True) as late:
            assert late.memory.engine.options.decode_graphs
            assert isinstance(late.memory.blocks.bytes, RemoteRankBytes)
            await continues_exactly(reference, late, alone, 1)
            await continues_exactly(reference, alone, late, 2)
            assert any(late.memory.engine.profile().values())
            assert device.num_replays == 0
