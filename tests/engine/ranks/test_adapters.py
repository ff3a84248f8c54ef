"""LoRA adapters over several ranks: split as their projections, tokens as from the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moonpool.engine.errors import AdapterRefused
from tests.engine.adapters import adapted, make_adapter, ref_of
from tests.engine.conftest import Reference, prompt
from tests.engine.ranks.conftest import ranks, serving

NUM_TOKENS = 10


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2}, {"cp": 2, "cp_min_tokens": 16}], ids=str)
async def test_ranks_split_adapters(checkpoint: Reference, tmp_path: Path, plan: dict[str, Any]) -> None:
    models = [
        checkpoint,
        make_adapter(checkpoint, tmp_path / "all", seed=1, r=5),
        make_adapter(checkpoint, tmp_path / "some", seed=2, r=9, target_modules=["o_proj", "v_proj"]),
    ]
    async with ranks(2) as group, serving(checkpoint.path, group, **plan) as driver:
        sequences = [
            driver.sequence(prompt(40 + i), root_key=bytes([i]) * 16, max_tokens=NUM_TOKENS, ignore_eos=True)
            for i in range(3)
        ]
        paths = [None, *(model.path for model in models[1:])]
        async with adapted(driver.engine, list(zip(sequences, paths, strict=True))):
            results = await driver.run(*sequences)
        for i, (model, result) in enumerate(zip(models, results, strict=True)):
            assert result.token_ids == model.greedy(prompt(40 + i), NUM_TOKENS), model.path.name


async def test_a_rank_that_refuses_the_files_ends_nothing(checkpoint: Reference, tmp_path: Path) -> None:
    model = make_adapter(checkpoint, tmp_path / "a", seed=1)
    async with ranks(2) as group, serving(checkpoint.path, group, tp=2) as driver:
        ref = ref_of(driver.engine, model.path)
        make_adapter(checkpoint, tmp_path / "a", seed=2)
        refused = driver.sequence(prompt(20))
        with pytest.raises(AdapterRefused, match="has changed"):
            async with driver.engine.adapters.pinned(ref, refused) as pin:
                await pin.give(refused)
        (result,) = await driver.run(driver.sequence(prompt(20), max_tokens=NUM_TOKENS, ignore_eos=True))
        assert result.token_ids == checkpoint.greedy(prompt(20), NUM_TOKENS)


@pytest.mark.parametrize(
    ("plan", "num_blocks"),
    [({"tp": 2}, 32), pytest.param({"cp": 2}, 44, marks=pytest.mark.slow)],  # cp ranks have an adapter each
    ids=["tp2", "cp2"],
)
async def test_ranks_reuse_blocks_in_step(
    checkpoint: Reference, tmp_path: Path, plan: dict[str, int], num_blocks: int
) -> None:
    """Adapters and KV evict each other on all ranks."""
    models = [
        checkpoint,
        make_adapter(checkpoint, tmp_path / "a", seed=1, r=5),
        make_adapter(checkpoint, tmp_path / "b", seed=2, r=6),
    ]
    async with ranks(2) as group, serving(checkpoint.path, group, num_blocks=num_blocks, **plan) as driver:
        for turn in range(9):
            model = models[turn % 3]
            ids = prompt(40 + turn, seed=turn)
            root_key = bytes([turn % 3]) * 16
            sequence = driver.sequence(ids, root_key=root_key, max_tokens=NUM_TOKENS, ignore_eos=True)
            path = None if model is checkpoint else model.path
            async with adapted(driver.engine, [(sequence, path)]):
                (result,) = await driver.run(sequence)
            assert result.token_ids == model.greedy(ids, NUM_TOKENS), turn
        assert driver.engine.adapters.counts.evictions > 1
