"""Pages in float8: smaller, near the exact ones, and the same tokens wherever and however they are made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.errors import ConfigError
from tests.engine.conftest import prompt

# Of log probabilities of the small model of the tests, whose KV values are far apart: e4m3 keeps four bits
# of each.
TOLERANCE = 0.6


async def logprobs(driver: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Of each prompt token but the first."""
    sequence = driver.sequence(tokens, max_tokens=1, num_logprobs=0, prompt_logprobs=True)
    (result,) = await driver.run(sequence)
    return np.array([token.logprob for token in result.events[-1].prompt_logprobs])


async def test_a_page_is_a_quarter_and_near(make_checkpoint: Callable[..., Any], serve: Any) -> None:
    checkpoint = make_checkpoint("llama")
    async with serve(checkpoint.path) as exact, serve(checkpoint.path, kv_dtype="fp8_e4m3") as driver:
        wide, layout = exact.engine.layout, driver.engine.layout
        assert layout.dtype == "float8_e4m3fn"
        assert layout.block_nbytes * 4 == wide.block_nbytes
        assert layout.fingerprint != wide.fingerprint, "nodes that differ do not exchange blocks"
        assert isinstance(layout, KVLayout)
        assert driver.engine.pool_tensor.nbytes * 4 == exact.engine.pool_tensor.nbytes
        tokens = prompt(60)
        off = np.abs(await logprobs(driver, tokens) - await logprobs(exact, tokens))
        assert off.max() < TOLERANCE
        assert off.mean() < TOLERANCE / 5


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
async def test_tokens_do_not_depend_on_how_they_were_computed(
    make_checkpoint: Callable[..., Any], serve: Any, family: str
) -> None:
    """Alone, in a batch, in chunks, or over a cached prefix: what is stored is the same bytes."""
    checkpoint = make_checkpoint(family)
    prompts = [prompt(n, n) for n in (5, 40, 77)]
    async with serve(checkpoint.path, kv_dtype="fp8_e4m3") as driver:
        alone = [(await driver.run(driver.sequence(p, max_tokens=16)))[0].token_ids for p in prompts]
        again = await driver.run(*(driver.sequence(p, max_tokens=16) for p in prompts))
        assert [result.token_ids for result in again] == alone
    async with serve(checkpoint.path, kv_dtype="fp8_e4m3", max_batch_tokens=9) as driver:
        chunked = await driver.run(*(driver.sequence(p, max_tokens=16) for p in prompts))
        assert [result.token_ids for result in chunked] == alone


async def test_the_checkpoints_scales_are_used(
    make_checkpoint: Callable[..., Any], serve: Any, tmp_path: Path
) -> None:
    """Keys and values beyond 448 scales are cut off, so a scale far too small shows."""
    checkpoint = make_checkpoint("llama")
    tokens = prompt(40)
    found = []
    for name, scale in (("fit", 0.02), ("small", 1e-5)):
        path = copytree(checkpoint.path, tmp_path / name)
        tensors = load_file(path / "model.safetensors")
        for layer in range(3):
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(scale)
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([scale])
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        async with serve(path) as plain:
            (result,) = await plain.run(plain.sequence(tokens, max_tokens=8))
            assert result.token_ids == checkpoint.greedy(tokens, 8), "other pages have no scales"
            exact = await logprobs(plain, tokens)
        async with serve(path, kv_dtype="fp8_e4m3") as driver:
            assert driver.engine._loop.runner.model.layers[1].v_scale == pytest.approx(scale)
            found.append(np.abs(await logprobs(driver, tokens) - exact).max())
    fit, small = found
    assert fit < TOLERANCE < small


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype"):
        EngineOptions(kv_dtype="int8")
