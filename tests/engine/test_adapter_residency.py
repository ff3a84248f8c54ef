"""Which adapters are in memory: loads beside other work, rows, failures, keys."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence as Blocks
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonpool.engine.adapters.packing import AdapterPacking, ranks_of
from moonpool.engine.adapters.pages import AdapterPages
from moonpool.engine.adapters.peft import WEIGHTS_FILE, PeftAdapter
from moonpool.engine.adapters.registry import AdapterRegistry
from moonpool.engine.adapters.residency import AdapterPin, AdapterRef, AdapterResidency
from moonpool.engine.adapters.shapes import AdapterKeys, AdapterShapes
from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.errors import AdapterRefused
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import KVLayout
from tests.engine.adapters import make_adapter
from tests.engine.conftest import Reference


class Loads:
    """A pool, and loads into it that end when told to. An adapter has as many blocks as its rank."""

    def __init__(self, num_blocks: int) -> None:
        self.now_s = 0.0
        self.running: dict[str, asyncio.Future[None]] = {}
        self.pool = BlockPool(num_blocks, 16)
        self.residency = AdapterResidency(self.pool, self, self._room, clock=lambda: self.now_s)

    async def num_blocks(self, ref: AdapterRef) -> int:
        return ref.rank

    async def load(self, ref: AdapterRef, number: int, block_ids: Blocks) -> str:
        assert len(block_ids) == ref.rank
        self.running[ref.name] = ended = asyncio.get_running_loop().create_future()
        await ended
        return "file"

    def keys(self, ref: AdapterRef) -> list[BlockKey]:
        return [BlockKey(f"{ref.name} {number}".encode()) for number in range(ref.rank)]

    async def _room(self, num_blocks: int, request: Sequence) -> list[int]:
        while num_blocks > self.pool.num_spare:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return self.pool.allocate(num_blocks)

    async def begun(self, name: str) -> asyncio.Future[None]:
        while name not in self.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return self.running.pop(name)

    def pinned(self, name: str, rank: int = 4) -> AbstractAsyncContextManager[AdapterPin]:
        return self.residency.pinned(AdapterRef(name, f"digest of {name}", Path("/") / name, rank), request())

    async def use(self, name: str) -> Sequence:
        """Give the adapter to a sequence, which keeps it."""
        sequence = request()
        async with self.pinned(name) as pin:
            await pin.give(sequence)
        return sequence

    def end(self, sequence: Sequence) -> None:
        """As the scheduler does."""
        self.pool.release(sequence.adapter_blocks)

    def check_empty(self, num_idle: int) -> None:
        self.residency.check_integrity()
        self.pool.check_integrity()
        assert (self.pool.num_used, self.pool.num_cached) == (0, num_idle)


async def settled() -> None:
    """All that waits for no load, and for no room, has gone on as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


def request() -> Sequence:
    return Sequence("request", 0, [1], 1, sampling=Sampling(), root_key=b"")


async def test_a_load_beside_other_work_is_hidden() -> None:
    made, first, second = Loads(16), request(), request()
    async with made.pinned("a") as pin:
        load = await made.begun("a")
        made.now_s = 3.0  # its blocks were fetched meanwhile
        waiting = asyncio.ensure_future(pin.give(first))
        await asyncio.sleep(0)
        made.now_s = 4.0
        load.set_result(None)
        await waiting
        await pin.give(second)
        assert first.adapter == second.adapter == 0
    third = await made.use("a")
    assert third.adapter == 0
    counts = made.residency.counts
    assert (sum(counts.load_s_from.values()), counts.hidden_load_s) == (4.0, 3.0)
    assert (counts.hits, counts.misses, counts.loads) == (1, 1, 1)
    for one in (first, second, third):
        assert made.residency.num_used_blocks == 4
        made.end(one)
    made.check_empty(num_idle=4)


async def test_a_request_that_gives_up_leaves_the_load_to_the_next() -> None:
    made = Loads(16)
    giving_up = asyncio.ensure_future(made.use("a"))
    load = await made.begun("a")
    giving_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await giving_up
    load.set_result(None)
    async with asyncio.timeout(60):
        made.end(await made.use("a"))
    assert made.residency.counts.loads == 1
    assert made.residency.digests == ["digest of a"]
    made.check_empty(num_idle=4)


async def test_a_failed_load_tells_all_that_wait_and_is_tried_again() -> None:
    made = Loads(16)
    waiting = [asyncio.ensure_future(made.use("a")) for _ in range(3)]
    (await made.begun("a")).set_exception(AdapterRefused(Path("/a"), "it is corrupt"))
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, AdapterRefused) for one in found)
    made.check_empty(num_idle=0)
    again = asyncio.ensure_future(made.use("a"))
    (await made.begun("a")).set_result(None)
    assert (await again).adapter == 1
    assert made.residency.counts.failed_loads == 1


async def test_what_loads_or_is_used_stays() -> None:
    made = Loads(16)
    used = request()
    async with made.pinned("a") as a:
        load = await made.begun("a")
        async with made.pinned("b"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), made.pinned("c"):
                    pass
            (await made.begun("b")).set_result(None)
        load.set_result(None)
        await a.give(used)  # a sequence goes on with "a"
    using = asyncio.ensure_future(made.use("c"))
    (await made.begun("c")).set_result(None)
    made.end(await using)
    made.pool.allocate(made.pool.num_free)
    assert made.residency.digests == ["digest of a"]
    assert made.residency.counts.evictions == 2
    made.residency.check_integrity()


async def test_what_needs_room_comes_in_its_turn() -> None:
    """An idle adapter does not return before a large one that waits, however often it is asked for."""
    made = Loads(16)
    for name in ("a", "b"):
        using = asyncio.ensure_future(made.use(name))
        (await made.begun(name)).set_result(None)
        if name == "a":
            running = await using
        else:
            made.end(await using)
    large = asyncio.ensure_future(made.pinned("large", 8).__aenter__())
    await settled()
    waits = asyncio.ensure_future(made.use("b"))
    await settled()
    assert not waits.done()
    made.end(running)
    (await made.begun("large")).set_result(None)
    await large
    assert not waits.done()
    waits.cancel()


@given(st.lists(st.tuples(st.sampled_from(["use", "end", "fail", "fill"]), st.integers(0, 9)), max_size=60))
async def test_no_block_is_lost(steps: list[tuple[str, int]]) -> None:
    """Whatever ends, fails, or is evicted by others."""
    made = Loads(20)
    sequences: list[Sequence] = []
    for what, number in steps:
        name = str(number)
        if what in ("use", "fail"):
            using = asyncio.ensure_future(made.use(name))
            for _ in range(8):
                await asyncio.sleep(0)
            if load := made.running.pop(name, None):
                if what == "fail":
                    load.set_exception(AdapterRefused(Path("/"), "it is corrupt"))
                else:
                    load.set_result(None)
                for _ in range(8):
                    await asyncio.sleep(0)
            using.cancel()
            (found,) = await asyncio.gather(using, return_exceptions=True)
            if isinstance(found, Sequence):
                sequences.append(found)
        elif what == "end" and sequences:
            made.end(sequences.pop(number % len(sequences)))
        elif what == "fill":
            blocks = made.pool.allocate(min(number, made.pool.num_free))
            made.pool.release(blocks)
        made.residency.check_integrity()
        made.pool.check_integrity()
    for one in sequences:
        made.end(one)
    assert made.pool.num_used == 0
    made.check_empty(num_idle=made.residency.num_blocks)


def packing_of(config: ModelConfig, block_nbytes: int = 12288) -> AdapterPacking:
    return AdapterPacking(config, ParallelPlan().shard(config, 0), torch.float32, block_nbytes)


@pytest.fixture
def folder(checkpoint: Reference, tmp_path: Path) -> Path:
    for seed in range(3):
        make_adapter(checkpoint, tmp_path / str(seed), seed=seed, r=4)
    return tmp_path


def test_what_was_read_is_known_without_its_files(checkpoint: Reference, folder: Path) -> None:
    config = ModelConfig.from_checkpoint(checkpoint.path)
    adapter = PeftAdapter(folder / "0", config)
    packing = packing_of(config)
    shapes = AdapterShapes([packing, packing_of(config, 6144)])
    assert shapes.get(adapter.digest) is None
    assert shapes.read(adapter.path, adapter.digest).num_blocks > len(packing.pack(adapter))
    shutil.rmtree(folder)
    known = shapes.get(adapter.digest)
    assert known is not None
    assert known.ranks.tolist() == [4] * len(packing.sizes)
    with pytest.raises(AdapterRefused, match="cannot be read"):
        shapes.read(adapter.path, adapter.digest)


def test_blocks_that_the_kernels_do_not_reach_are_refused(checkpoint: Reference, folder: Path) -> None:
    """Lines have 32 bits: a pool of more than 128 GiB has blocks beyond."""
    config = ModelConfig.from_checkpoint(checkpoint.path)
    adapter, packing = PeftAdapter(folder / "0", config), packing_of(config)
    pages, ranks = AdapterPages(packing, torch.zeros(1)), ranks_of(adapter, config)
    blocks = list(range(packing.num_blocks(ranks)))
    pages.place(ranks, 1, blocks)
    last = (1 << 37) // 12288 + 1
    with pytest.raises(
        AdapterRefused, match=r"beyond the first 128 GiB .* set a smaller engine\.pool_nbytes"
    ):
        pages.place(ranks, 2, [*blocks[:-1], last])


def test_keys_name_the_content_and_how_it_is_cut(checkpoint: Reference) -> None:
    config = ModelConfig.from_checkpoint(checkpoint.path)
    layout = KVLayout(3, 2, 8, 16, "float32")

    def keys(digest: str = "a", dtype: str = "float32", tp: int = 1, layout: KVLayout = layout) -> set[bytes]:
        shards = ParallelPlan(tp=tp).shards(config)
        chain = AdapterKeys(config, layout, dtype, shards).chain(digest, 3)
        assert chain[:2] == AdapterKeys(config, layout, dtype, shards).chain(digest, 2)
        return set(chain)

    others = [
        keys("b"),
        keys(dtype="bfloat16"),
        keys(tp=2),
        keys(layout=KVLayout(3, 2, 8, 16, "int8")),
    ]
    assert keys() == keys()
    assert len(keys().union(*others)) == 15


async def test_names_are_listed_in_pages(checkpoint: Reference, folder: Path) -> None:
    config = ModelConfig.from_checkpoint(checkpoint.path)
    with ThreadPoolExecutor(1) as reader:
        registry = AdapterRegistry(config, AdapterShapes([packing_of(config)]), reader)
        for name in "cab":
            await registry.register(name, folder / "0")
        before = registry.version
        with pytest.raises(AdapterRefused):
            await registry.register("d", folder / WEIGHTS_FILE)
        assert registry.version == before
        first, more = registry.page("", 2)
        rest, end = registry.page(first[-1].name, 2)
        assert ([one.name for one in first], more) == (["a", "b"], True)
        assert ([one.name for one in rest], end) == (["c"], False)
        assert registry.remove("a") and not registry.remove("a")
        assert registry.version == before + 1


@pytest.mark.parametrize("block_nbytes", [448, 1000, 12288])
def test_rows_are_packed_one_after_the_other(checkpoint: Reference, folder: Path, block_nbytes: int) -> None:
    """Each row lies whole within one block, and none over another."""
    config = ModelConfig.from_checkpoint(checkpoint.path)
    adapter, packing = PeftAdapter(folder / "0", config), packing_of(config, block_nbytes)
    ranks, image = ranks_of(adapter, config), packing.pack(adapter)
    lines, values = packing.places(ranks)[0], image.view(-1)
    used = torch.zeros(len(values), dtype=torch.bool)
    for number, module in enumerate(packing.sizes):
        factors = adapter.factors[module]
        for side, part in enumerate((factors.a, factors.b)):
            for row, line in zip(part, lines[number, :, side].tolist(), strict=True):
                first, end = line * 16, line * 16 + len(row)
                assert torch.equal(values[first:end], row)
                assert line // packing.lines_a_block == (end - 1) // 16 // packing.lines_a_block
                assert not used[first:end].any()
                used[first:end] = True
    assert len(image) == packing.num_blocks(ranks)
    if block_nbytes > 10_000:
        assert used.sum() > 0.8 * len(values)  # the last block is half full


def test_blocks_shorter_than_a_row_are_refused(checkpoint: Reference, folder: Path) -> None:
    config = ModelConfig.from_checkpoint(checkpoint.path)
    with pytest.raises(AdapterRefused, match=r"384 bytes, a block of the KV pool 383: raise engine.block"):
        AdapterShapes([packing_of(config, 383)]).learn(PeftAdapter(folder / "0", config))
