"""Models of which some layers have windows: what the others keep of passed blocks shares blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.decode_node.departures import Departures
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import StepOutput, StepPlan
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.memory.packing import Packing
from moonpool.engine.node.handover import HandoverFailed
from moonpool.protos import node_pb2
from moonpool.runtime.config.engine_options import SpeculativeOptions
from tests.engine.conftest import prompt, proposing
from tests.engine.ranks.conftest import ranks, serving
from tests.engine.ranks.test_exact import SHAPE
from tests.engine.ranks.test_handover import continues_exactly, side
from tests.engine.test_scheduler import (
    BLOCK_SIZE,
    REQUESTS,
    Cluster,
    HashModel,
    nothing_is_lost,
    sequence,
    speculating,
)

WINDOW = 20
# Two, four and two blocks in a pack.
MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}),
    "gpt-oss": ("gpt_oss", {}),
}


@pytest.fixture(params=MIXED)
def mixed(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Any]) -> Any:
    return of_family(make_checkpoint, request.param)


def of_family(make_checkpoint: Callable[..., Any], name: str) -> Any:
    family, words = MIXED[name]
    return make_checkpoint(family, **SHAPE, **words, num_hidden_layers=4, sliding_window=WINDOW)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is packed in this process."""
    monkeypatch.setattr(Packing, "choose", lambda windows, **_: None)


@pytest.mark.parametrize(
    ("windows", "shifts"),
    [
        ([128, 0] * 12, 2),  # gpt-oss
        (([512] * 5 + [0]) * 4 + [512] * 2, 6),  # Gemma 3 1B
        ([0, 0, 4, 4, 4, 4, 4], 3),
        ([4, 0, 0, 4], 2),
        ([0, 4], 2),
        ([4] * 59 + [0], 32),
    ],
)
def test_a_pack_has_the_pages_of_so_many_blocks(windows: list[int], shifts: int) -> None:
    packing = Packing.of(windows)
    assert packing is not None
    assert len(packing.shifts) == shifts


@pytest.mark.parametrize("windows", [[0, 0], [4, 4], [0, 4, 0], [0]])
def test_where_nothing_is_saved_nothing_is_packed(windows: list[int]) -> None:
    assert Packing.of(windows) is None


@given(st.lists(st.sampled_from([0, 0, 4, 8]), min_size=2, max_size=30))
def test_places_of_a_pack_are_apart_and_inside(windows: list[int]) -> None:
    packing = Packing.of(windows)
    if packing is None:
        return
    pages = [
        packing.place_in(3, k) + packing.shifts[0] + layer
        for k in range(len(packing.shifts))
        for layer in packing.full_layers
    ]
    assert len(set(pages)) == len(pages)
    assert all(page // packing.num_layers == 3 for page in pages)


class PackedModel(HashModel):
    """The hash model with layers: some read through their windows, the others by places."""

    def __init__(self, num_blocks: int, packing: Packing) -> None:
        self.pages = np.zeros((num_blocks * packing.num_layers, BLOCK_SIZE), np.uint64)
        self.packing = packing

    def execute(self, plan: StepPlan) -> StepOutput:
        first = self.packing.shifts[0]
        for move in plan.moves:
            for layer in self.packing.full_layers:
                self.pages[move.after + first + layer] = self.pages[move.before + first + layer]
        return super().execute(plan)

    def _write(self, s: Sequence, tokens: np.ndarray, start: int, n: int) -> None:
        for position in range(start, start + n):
            column, offset = divmod(position, BLOCK_SIZE)
            first = s.block_table[column] * self.packing.num_layers
            self.pages[first : first + self.packing.num_layers, offset] = self._kv(tokens, position)

    def _check(self, s: Sequence, tokens: np.ndarray) -> None:
        packing, last = self.packing, len(tokens) - 1
        places = packing.places(s.block_table, s.packed)
        for position in range(len(tokens)):
            column, offset = divmod(position, BLOCK_SIZE)
            sees = position > last - packing.window
            for layer in range(packing.num_layers):
                if layer in packing.full_layers:
                    page = places[column] + packing.shifts[0] + layer
                elif sees:
                    page = s.block_table[column] * packing.num_layers + layer
                else:
                    continue
                assert self.pages[page, offset] == self._kv(tokens, position), f"{s} reads foreign KV"


@pytest.mark.slow
@settings(max_examples=160, deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(8, 24),
    max_batch_size=st.integers(1, 5),
    proposer=st.sampled_from(["none", "guess", "ngram"]),
    windows=st.sampled_from([[6, 0], [3, 3, 0, 3], [0, 5, 0, 5], [1, 0, 1]]),
)
def test_nothing_foreign_is_read_whatever_moves(
    requests, num_blocks, max_batch_size, proposer, windows
) -> None:
    packing = Packing.of(windows)
    assert packing is not None
    cluster = Cluster(num_blocks, max_batch_size, packing=packing)
    cluster.model = PackedModel(num_blocks, packing)
    if proposer != "none":
        speculating(cluster, proposer)
    nothing_is_lost(cluster, requests)


def test_blocks_that_another_node_reads_stay_whole() -> None:
    packing = Packing.of([6, 0])
    assert packing is not None
    cluster = Cluster(16, packing=packing)
    cluster.model = PackedModel(16, packing)
    one, other = (sequence(name, [i] * 20, 12, 0, 0.0) for i, name in enumerate("ab"))
    one.stays_whole = True
    cluster.scheduler.add(one)
    cluster.scheduler.add(other)
    while cluster.scheduler.num_waiting or not other.packs:
        assert cluster.step()
    assert not one.packs
    assert min(one.block_table) >= 0
    cluster.run()


async def test_a_request_with_packs_stays_where_it_is(make_checkpoint, serve_on) -> None:
    mixed = of_family(make_checkpoint, "gpt-oss")
    async with serve_on(CpuDevice(), mixed.path, num_blocks=20) as driver:
        one = driver.sequence(prompt(60), max_tokens=60)
        driver.engine.add(one)
        await driver.until(lambda: bool(one.packs))
        departures = Departures(SimpleNamespace(engine=driver.engine))  # type: ignore[arg-type]
        request = node_pb2.FollowRequest(num_tokens=one.num_tokens)
        with pytest.raises(HandoverFailed, match="windows have passed"):
            await anext(departures.chunks(one, request))
        await driver.until(lambda: bool(one.finish_reason))
        assert driver.results[one.key].token_ids == mixed.greedy(prompt(60), 60)


async def fill(mixed: Any, serve_on: Any, **words: Any) -> tuple[int, int]:
    """Run four sequences of 130 tokens, 17 blocks each, in 52. Return how many were preempted, and the most
    blocks that were packed at once."""
    prompts, most = [prompt(40, seed) for seed in range(4)], 0
    async with serve_on(CpuDevice(), mixed.path, num_blocks=52, max_batch_tokens=16, **words) as driver:

        def note(events: list[Any], then: Any = driver.engine.on_step) -> None:
            nonlocal most
            most = max(most, driver.engine.stats().num_packed_blocks)
            then(events)

        driver.engine.on_step = note
        results = await driver.run(*(driver.sequence(p, max_tokens=90) for p in prompts))
        assert [r.token_ids for r in results] == mixed.greedy_each(prompts, 90)
        driver.engine.pool.check_integrity()
        return driver.engine.stats().num_preemptions, most


async def test_more_sequences_fit_in_the_same_bytes(mixed, serve_on) -> None:
    num_preemptions, most = await fill(mixed, serve_on)
    assert num_preemptions == 0
    assert most >= 4 * 8


@pytest.mark.usefixtures("whole")
async def test_without_packs_they_do_not_fit(make_checkpoint, serve_on) -> None:
    num_preemptions, most = await fill(of_family(make_checkpoint, "gemma2"), serve_on)
    assert num_preemptions > 0
    assert most == 0


async def test_a_prefix_that_was_packed_is_found_again(mixed, serve_on) -> None:
    tokens = prompt(60)
    # Room for both, 14 blocks each, and their packs: they are packed, and nothing is evicted.
    async with serve_on(CpuDevice(), mixed.path, num_blocks=42, max_batch_tokens=16) as driver:
        both = [driver.sequence(tokens, max_tokens=50), driver.sequence(prompt(60, 1), max_tokens=50)]
        for one in both:
            driver.engine.add(one)
        await driver.until(lambda: any(one.packed for one in both))
        await driver.until(lambda: all(one.finish_reason for one in both))
        first, other = (driver.results[one.key] for one in both)
        assert other.token_ids == mixed.greedy(prompt(60, 1), 50)
        again = driver.sequence(tokens + first.token_ids[:40], max_tokens=10)
        (second,) = await driver.run(again)
        assert again.num_cached_tokens == 96
        assert second.token_ids == first.token_ids[40:] == mixed.greedy(tokens, 50)[40:]


async def test_preempted_and_sharing_sequences_are_exact(mixed, serve_on) -> None:
    shared = prompt(24, 9)
    prompts = [shared + prompt(10 + 5 * seed, seed) for seed in range(5)]
    async with serve_on(CpuDevice(), mixed.path, num_blocks=20, max_batch_tokens=8) as driver:
        results = await driver.run(*(driver.sequence(p, max_tokens=60) for p in prompts))
        assert [r.token_ids for r in results] == mixed.greedy_each(prompts, 60)
        assert driver.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.slow
async def test_pages_in_8_bits_move_with_their_scales(make_checkpoint, serve_on, kv_dtype: str) -> None:
    path, prompts = of_family(make_checkpoint, "gpt-oss").path, [prompt(40, seed) for seed in range(4)]
    tokens = []
    for num_blocks in (256, 52):  # the first have room to stay whole
        async with serve_on(CpuDevice(), path, num_blocks=num_blocks, kv_dtype=kv_dtype) as driver:
            results = await driver.run(*(driver.sequence(p, max_tokens=90) for p in prompts))
            tokens.append([r.token_ids for r in results])
            assert driver.engine.stats().num_preemptions == 0
    assert tokens[0] == tokens[1]


@pytest.mark.slow
async def test_proposed_tokens_are_verified_beside_packs(mixed, serve_on) -> None:
    options = SpeculativeOptions(method="suffix", num_tokens=4)
    async with serve_on(CpuDevice(), mixed.path, num_blocks=24, speculative=options) as driver:
        proposing(driver.engine)
        prompts = [prompt(20, seed) * 2 for seed in range(2)]
        results = await driver.run(*(driver.sequence(p, max_tokens=80) for p in prompts))
        assert [r.token_ids for r in results] == mixed.greedy_each(prompts, 80)


async def test_it_packs_what_another_node_handed_over(mixed) -> None:
    async with AsyncExitStack() as stack:
        # The prompt's six blocks, and two more.
        few = {"pool_nbytes": 9 * 4 * 2 * 2 * 8 * 16 * 4}
        source = await stack.enter_async_context(side(mixed.path, "source", 2, 1))
        target = await stack.enter_async_context(side(mixed.path, "target", 1, 1, **few))
        engine, most = target.memory.engine, 0
        assert engine.pool.num_blocks == 9

        def note(events: list[Any], then: Any = engine.on_step) -> None:
            nonlocal most
            most = max(most, engine.stats().num_packed_blocks)
            then(events)

        engine.on_step = note
        for seed in range(3):
            await continues_exactly(mixed, source, target, seed, 51)
        assert most > 0
        assert engine.pool.num_used == 0


@pytest.mark.slow
async def test_tensor_parallel_ranks_pack_alike(mixed) -> None:
    prompts = [prompt(40, seed) for seed in range(4)]
    async with (
        ranks(2) as group,
        serving(mixed.path, group, tp=2, num_blocks=52, dtype="float32", max_batch_tokens=16) as driver,
    ):
        results = await driver.run(*(driver.sequence(p, max_tokens=90) for p in prompts))
        assert [r.token_ids for r in results] == mixed.greedy_each(prompts, 90)
        assert driver.engine.stats().num_preemptions == 0
