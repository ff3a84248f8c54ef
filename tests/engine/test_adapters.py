"""Sequences with LoRA adapters get the tokens of the merged models, whatever else is in their batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.device.selection import choose_device
from moonpool.engine.engine import Engine
from moonpool.engine.errors import AdapterRefused, SequenceTooLong
from moonpool.engine.speculation.speculator import Speculator
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.runtime.config.engine_options import SpeculativeOptions
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from tests.engine.adapters import adapted, make_adapter, ref_of
from tests.engine.conftest import PAGES, VOCAB_SIZE, Driver, Reference, Result, prompt

NUM_TOKENS = 12
# Different ranks and projections; each has its own root of block keys.
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "use_rslora": True},
    "patterns": {
        "r": 6,
        "rank_pattern": {"down_proj": 11, "layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"o_proj": 3},
        "target_modules": ["q_proj", "o_proj", "down_proj"],
    },
    "one layer": {"r": 1, "target_modules": ["up_proj", "k_proj"], "layers_to_transform": [2]},
}


@pytest.fixture(scope="module")
def make(
    make_checkpoint: Callable[..., Reference], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Reference, dict[str, Reference]]]:
    made: dict[str, tuple[Reference, dict[str, Reference]]] = {}

    def make(family: str, kinds: dict[str, dict[str, Any]] = KINDS) -> tuple[Reference, dict[str, Reference]]:
        if family not in made:
            base, folder = make_checkpoint(family), tmp_path_factory.mktemp(f"{family} adapters")
            made[family] = (
                base,
                {
                    kind: make_adapter(base, folder / kind, seed=seed, **words)
                    for seed, (kind, words) in enumerate(kinds.items())
                },
            )
        return made[family]

    return make


async def exact(driver: Driver, base: Reference, adapters: dict[str, Reference], length: int = 21) -> None:
    """One batch of all adapters and none gives each its own model's tokens."""
    models = [base, *adapters.values(), base, *adapters.values()]
    prompts = [prompt(length + i, seed=i % 3) for i in range(len(models))]
    roots = {str(model.path): bytes([i]) * 16 for i, model in enumerate([base, *adapters.values()])}
    sequences = [
        driver.sequence(ids, root_key=roots[str(model.path)], max_tokens=NUM_TOKENS, ignore_eos=True)
        for ids, model in zip(prompts, models, strict=True)
    ]
    paths = [None if model is base else model.path for model in models]
    async with adapted(driver.engine, list(zip(sequences, paths, strict=True))):
        results = await driver.run(*sequences)
    for ids, model, result in zip(prompts, models, results, strict=True):
        assert result.token_ids == model.greedy(ids, NUM_TOKENS), model.path.name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
async def test_a_batch_mixes_adapters_and_none(serve: Any, make: Any, family: str) -> None:
    base, adapters = make(family)
    assert len({tuple(one.greedy(prompt(21), NUM_TOKENS)) for one in [base, *adapters.values()]}) > 3
    async with serve(base.path) as driver:
        await exact(driver, base, adapters)


@pytest.mark.parametrize("family", ["phi3", "glm4"])
async def test_matrices_that_the_checkpoint_stores_in_one_piece(serve: Any, make: Any, family: str) -> None:
    of_attention = ["qkv_proj"] if family == "phi3" else ["q_proj", "k_proj", "v_proj"]
    kinds = {"fused": {"target_modules": [*of_attention, "o_proj", "gate_up_proj", "down_proj"]}}
    base, adapters = make(family, kinds)
    async with serve(base.path) as driver:
        await exact(driver, base, adapters)


async def test_attention_of_a_mixture_of_experts(serve: Any, make: Any) -> None:
    base, adapters = make("qwen3_moe", {"attention": {"target_modules": ["q_proj", "k_proj", "o_proj"]}})
    async with serve(base.path) as driver:
        await exact(driver, base, adapters)


async def test_prompts_in_chunks(serve: Any, make: Any) -> None:
    base, adapters = make("llama")
    async with serve(base.path, max_batch_tokens=16) as driver:
        await exact(driver, base, adapters, length=50)


class Known:
    """Proposes the tokens of each sequence's own model, every fourth of them wrong."""

    def __init__(self, models: list[Reference]) -> None:
        self._models = models
        self._known: dict[tuple[bytes, bytes], list[int]] = {}

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        ids = sequence.token_ids[: sequence.num_prompt_tokens]
        key = sequence.root_key, ids.tobytes()
        if key not in self._known:
            self._known[key] = self._models[sequence.root_key[0]].greedy(ids.tolist(), NUM_TOKENS)
        first = sequence.num_output_tokens
        known = enumerate(self._known[key][first : first + most], first)
        return [token if at % 4 else (token + 1) % VOCAB_SIZE for at, token in known]


async def test_proposed_tokens_of_adapters_are_verified(serve: Any, make: Any) -> None:
    base, adapters = make("llama")
    async with serve(base.path) as driver:
        speculator = Speculator(SpeculativeOptions(method="ngram", num_tokens=3))
        known = Known([base, *adapters.values()])
        speculator._make = lambda: known
        driver.engine._scheduler.speculator = speculator
        await exact(driver, base, adapters)
        accepted = [sum(event.accepted for event in result.events) for result in driver.results.values()]
    assert min(accepted) >= 3


async def test_one_adapter_alone(serve: Any, make: Any) -> None:
    base, adapters = make("llama")
    for model in adapters.values():
        async with serve(base.path) as driver:
            sequence = driver.sequence(prompt(30), max_tokens=NUM_TOKENS, ignore_eos=True)
            async with adapted(driver.engine, [(sequence, model.path)]):
                (result,) = await driver.run(sequence)
        assert result.token_ids == model.greedy(prompt(30), NUM_TOKENS)


@asynccontextmanager
async def small_pool(base: Reference, num_blocks: int, **model: Any) -> AsyncIterator[Driver]:
    """An engine with so many blocks of 8 tokens, of which adapters may use half. Afterwards none is used."""
    options = EngineOptions(block_size=8)
    probe = Engine(base.path, options, ModelOptions(device="cpu"))
    options = replace(options, pool_nbytes=num_blocks * probe.layout.block_nbytes)
    engine = Engine(base.path, options, ModelOptions(device="cpu", **model))
    driver = Driver(engine)
    await engine.start()
    try:
        yield driver
        engine.adapters.check_integrity()
    finally:
        await engine.close()
    engine.pool.check_integrity()
    assert engine.pool.num_used == 0


def request(driver: Driver, name: str, seed: int, num_tokens: int = NUM_TOKENS) -> Sequence:
    """20 tokens of its own, and the root of its model."""
    root_key = name[:4].encode().ljust(16)
    return driver.sequence(prompt(20, seed), root_key=root_key, max_tokens=num_tokens, ignore_eos=True)


async def test_adapters_and_cached_kv_leave_by_last_use(make: Any) -> None:
    base, adapters = make("llama")
    # "all" takes 14 blocks, and a request leaves 3 in the cache.
    async with small_pool(base, 40) as driver:
        engine = driver.engine

        async def answer(name: str, seed: int) -> None:
            sequence = request(driver, name, seed)
            model = adapters.get(name, base)
            async with adapted(engine, [(sequence, model.path if name in adapters else None)]):
                (result,) = await driver.run(sequence)
            assert result.token_ids == model.greedy(prompt(20, seed), NUM_TOKENS), (name, seed)

        digest = ref_of(engine, adapters["all"].path).digest
        await answer("all", 0)
        for seed in range(1, 20):
            await answer("plain", seed)
            if digest not in engine.adapters.digests:
                break
        assert engine.adapters.counts.evictions == 1
        assert engine.pool.num_cached > 10  # KV that is younger
        cached = engine.pool.match(request_keys(driver, "plain", seed))
        assert cached
        for _ in range(5):  # it returns over the oldest KV, and stays while it is used
            await answer("all", 0)
            await answer("plain", seed)
        assert engine.adapters.counts.loads == 2
        assert engine.pool.match(request_keys(driver, "plain", seed)) == cached


def request_keys(driver: Driver, name: str, seed: int) -> list[BlockKey]:
    sequence = request(driver, name, seed)
    sequence.hash_blocks(8, 2)
    return sequence.keys


async def test_a_flood_of_adapters_and_prompts_in_a_small_pool(make: Any) -> None:
    """All at once: nothing waits for ever, no adapter leaves while it is used, and tokens are exact."""
    base, adapters = make("llama")
    names = [*adapters, "plain"]
    # The half that adapters may have has no room for all of them: "all" takes 14 blocks.
    async with small_pool(base, 30) as driver:
        engine = driver.engine
        on_step = engine.on_step
        assert on_step is not None

        def check(events: list[StepEvent]) -> None:
            on_step(events)
            numbers = {one.number for one in engine.adapters._residents.values()}
            unfinished = [event.sequence for event in events if not event.finish_reason]
            assert numbers >= {one.adapter for one in unfinished if one.adapter >= 0}
            engine.adapters.check_integrity()
            engine.pool.check_integrity()

        engine.on_step = check

        async def answer(number: int) -> None:
            name = names[number % len(names)]
            sequence, model = request(driver, name, number % 7), adapters.get(name, base)
            async with adapted(engine, [(sequence, model.path if name in adapters else None)]):
                engine.add(sequence)
            result = driver.results.setdefault(sequence.key, Result())
            await driver.until(lambda: bool(result.finish_reason))
            assert result.token_ids == model.greedy(prompt(20, number % 7), NUM_TOKENS), (name, number)

        async with asyncio.timeout(60):
            await asyncio.gather(*map(answer, range(40)))
        assert engine.adapters.counts.evictions


async def test_a_load_waits_for_room_while_others_are_in_use(make: Any) -> None:
    base, adapters = make("llama")
    async with small_pool(base, 32) as driver:
        engine = driver.engine
        running = request(driver, "all", 0, num_tokens=40)
        async with adapted(engine, [(running, adapters["all"].path)]):
            engine.add(running)
        # It is pinned by the sequence alone now.
        refs = {name: ref_of(engine, model.path) for name, model in adapters.items()}
        waiting = request(driver, "patterns", 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), engine.adapters.pinned(refs["patterns"], waiting):
                pass
        assert refs["all"].digest in engine.adapters.digests
        async with engine.adapters.pinned(refs["patterns"], waiting) as pin:  # when the sequence has ended
            assert driver.results[running.key].finish_reason
            await pin.give(waiting)
        engine.release(waiting)
        assert driver.results[running.key].token_ids == adapters["all"].greedy(prompt(20), 40)


async def test_a_request_has_the_turn_that_its_adapter_was_loaded_in(make: Any) -> None:
    """A priority exchanged it; with another's turn, that one could not be cancelled in the queue."""
    base, adapters = make("llama")
    async with small_pool(base, 32) as driver:
        engine = driver.engine
        everything = driver.sequence(prompt(250))
        assert engine.reserve(everything)
        patient, urgent = driver.sequence(prompt(20), priority=1), request(driver, "one layer", 1)
        pinned = engine.adapters.pinned(ref_of(engine, adapters["one layer"].path), urgent)

        async def load() -> None:
            async with pinned as pin:
                await pin.give(urgent)

        async with asyncio.timeout(60):
            reserving, loading = asyncio.create_task(engine.reserved(patient)), asyncio.create_task(load())
            while len(engine._reservations) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert engine._reservations.first is not patient
            engine.release(everything)
            await asyncio.gather(reserving, loading)
        assert urgent.order < patient.order
        engine.add(patient)
        engine.add(urgent)
        assert engine.cancel(*patient.key)
        result = driver.results.setdefault(urgent.key, Result())
        await driver.until(lambda: bool(result.finish_reason))
        assert result.token_ids == adapters["one layer"].greedy(prompt(20, 1), NUM_TOKENS)
        assert driver.results[patient.key].token_ids == []


async def test_an_adapter_larger_than_half_of_the_pool_is_refused(make: Any) -> None:
    base, adapters = make("llama")
    async with small_pool(base, 26) as driver:
        sentence = r"takes 14 KV blocks, and adapters may use 13 of the 26 of the pool: raise engine\.pool"
        with pytest.raises(AdapterRefused, match=sentence):
            async with adapted(driver.engine, [(request(driver, "all", 0), adapters["all"].path)]):
                pass


async def test_sequences_leave_room_for_adapters(make: Any) -> None:
    base, adapters = make("llama")
    async with small_pool(base, 30) as driver:
        engine = driver.engine
        assert engine.max_model_len == 240
        long = driver.sequence(prompt(130), max_tokens=8, ignore_eos=True)
        engine.add(long)
        with_adapter = request(driver, "all", 0)
        async with adapted(engine, [(with_adapter, adapters["all"].path)]):  # when the long one has ended
            assert driver.results[long.key].finish_reason
            (result,) = await driver.run(with_adapter)
        assert result.token_ids == adapters["all"].greedy(prompt(20), NUM_TOKENS)
        assert driver.results[long.key].token_ids == base.greedy(prompt(130), 8)
        with pytest.raises(SequenceTooLong):
            engine.add(driver.sequence(prompt(130)))
        (result,) = await driver.run(driver.sequence(prompt(100), max_tokens=40, ignore_eos=True))
        assert len(result.token_ids) == 20


async def test_files_that_changed_since_are_refused(make: Any, tmp_path: Path) -> None:
    base, _ = make("llama")
    make_adapter(base, tmp_path / "a", seed=1)
    async with small_pool(base, 40) as driver:
        engine = driver.engine
        ref = ref_of(engine, tmp_path / "a")
        make_adapter(base, tmp_path / "a", seed=2)
        for _ in range(2):
            with pytest.raises(AdapterRefused, match="has changed since"):
                async with engine.adapters.pinned(ref, request(driver, "a", 0)):
                    pass
        async with adapted(engine, [(sequence := request(driver, "a", 0), tmp_path / "a")]):
            engine.release(sequence)


@pytest.mark.parametrize(("device", "kv_dtype"), PAGES)
async def test_beside_kv_in_few_bits(serve_on: Any, make: Any, device: str, kv_dtype: str) -> None:
    """Blocks are bytes: the tokens are those of the merged model with the same KV."""
    serve = partial(serve_on, choose_device(device))
    base, adapters = make("llama")
    model = adapters["all"]
    words = {"kv_dtype": kv_dtype, "block_size": 8}
    async with serve(base.path, **words) as driver:
        sequence = request(driver, "all", 0)
        async with adapted(driver.engine, [(sequence, model.path)]):
            (result,) = await driver.run(sequence)
    model.model.save_pretrained(model.path / "merged")
    async with serve(model.path / "merged", **words) as driver:
        (expected,) = await driver.run(request(driver, "all", 0))
    assert result.token_ids == expected.token_ids
