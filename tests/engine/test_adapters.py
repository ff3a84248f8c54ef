"""Sequences with LoRA adapters get the tokens of the merged models, whatever else is in their batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.engine.adapters.arena import row_nbytes
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.engine import Engine
from moonpool.engine.errors import AdapterRefused
from moonpool.engine.speculation.speculator import Speculator
from moonpool.runtime.config.engine_options import SpeculativeOptions
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from tests.engine.adapters import adapted, make_adapter, ref_of
from tests.engine.conftest import VOCAB_SIZE, Driver, Reference, prompt

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


def small_engine(base: Reference, num_rows: int) -> Engine:
    """With memory for adapters of so many ranks in all."""
    nbytes = row_nbytes(ModelConfig.from_checkpoint(base.path), torch.float32)
    return Engine(
        base.path,
        EngineOptions(block_size=8, pool_nbytes=1 << 20),
        ModelOptions(device="cpu"),
        adapters_nbytes=num_rows * nbytes,
    )


async def test_the_least_recently_used_adapter_leaves_and_comes_back(make: Any) -> None:
    base, adapters = make("llama")
    engine = small_engine(
        base, 12
    )  # "all" of rank 8 and "attention" of 4, or "patterns" of 11 and "one layer"
    driver = Driver(engine)
    await engine.start()
    try:
        for name in ("all", "attention", "all", "patterns", "one layer", "patterns", "all"):
            model = adapters[name]
            sequence = driver.sequence(
                prompt(20), root_key=name[:4].encode() * 4, max_tokens=NUM_TOKENS, ignore_eos=True
            )
            async with adapted(engine, [(sequence, model.path)]):
                (result,) = await driver.run(sequence)
            assert result.token_ids == model.greedy(prompt(20), NUM_TOKENS), name
        assert engine.adapters.counts.loads == 5
    finally:
        await engine.close()


async def test_a_load_waits_for_room_while_others_are_in_use(make: Any) -> None:
    base, adapters = make("llama")
    engine = small_engine(base, 12)
    driver = Driver(engine)
    await engine.start()
    try:
        running = driver.sequence(prompt(20), max_tokens=40, ignore_eos=True)
        async with adapted(engine, [(running, adapters["all"].path)]):
            engine.add(running)
        # It is pinned by the sequence alone now.
        refs = {name: ref_of(engine, model.path) for name, model in adapters.items()}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), engine.adapters.using(refs["patterns"]):
                pass
        assert refs["all"].digest in engine.adapters.digests
        async with engine.adapters.using(refs["patterns"]):  # when the sequence has ended
            assert driver.results[running.key].finish_reason
            assert refs["all"].digest not in engine.adapters.digests
        assert driver.results[running.key].token_ids == adapters["all"].greedy(prompt(20), 40)
    finally:
        await engine.close()


async def test_an_adapter_larger_than_all_memory_is_refused(make: Any) -> None:
    base, adapters = make("llama")
    engine = small_engine(base, 7)
    await engine.start()
    try:
        with pytest.raises(AdapterRefused, match=r"rank 8; lora\.memory_nbytes has room for ranks up to 7"):
            async with engine.adapters.using(ref_of(engine, adapters["all"].path)):
                pass
    finally:
        await engine.close()


async def test_files_that_changed_since_are_refused(make: Any, tmp_path: Path) -> None:
    base, _ = make("llama")
    engine = small_engine(base, 64)
    make_adapter(base, tmp_path / "a", seed=1)
    await engine.start()
    try:
        ref = ref_of(engine, tmp_path / "a")
        make_adapter(base, tmp_path / "a", seed=2)
        for _ in range(2):
            with pytest.raises(AdapterRefused, match="has changed since"):
                async with engine.adapters.using(ref):
                    pass
        async with engine.adapters.using(ref_of(engine, tmp_path / "a")):
            pass
    finally:
        await engine.close()
