"""Steps that only decode run all layers in one call, with the bits of the separate operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool.engine.device.selection import choose_device
from moonpool.engine.model.decoder import Decoder
from moonpool.kernels.cpu import decoder_layers
from moonpool.kernels.cpu.decoder_layers import DecoderLayers
from moonpool.kernels.cpu.library import load
from moonpool.kernels.mode import mode

pytestmark = pytest.mark.skipif(load() is None or mode() != "auto", reason="needs the compiled library")

FORMS = [
    ("qwen3", {"dtype": "bfloat16"}),
    ("qwen2", {"dtype": "float32", "threads": 2}),
    ("llama", {"dtype": "float16", "kv_dtype": "int8"}),
    ("qwen3", {"dtype": "bfloat16", "kv_dtype": "fp8_e4m3", "weights": "int8", "threads": 2}),
    ("llama", {"dtype": "bfloat16", "weights": "int4"}),
]


async def generated(driver: Any) -> list[list[tuple[int, float]]]:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 160, n).tolist() for n in (3, 17, 40)]
    sequences = [driver.sequence(prompt, max_tokens=10, num_logprobs=0) for prompt in prompts]
    return [
        [(event.token_id, event.logprobs.logprob) for event in result.events if event.token_id >= 0]
        for result in await driver.run(*sequences)
    ]


@pytest.mark.parametrize(("family", "words"), FORMS)
async def test_one_call_has_the_bits_of_separate_operations(
    family: str,
    words: dict[str, Any],
    make_checkpoint: Callable[..., Any],
    serve_on: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, device = make_checkpoint(family).path, choose_device("cpu")
    batches: list[int] = []
    call = DecoderLayers.__call__

    def counted(self: DecoderLayers, hidden: Any, *rest: Any) -> Any:
        batches.append(len(hidden))
        return call(self, hidden, *rest)

    monkeypatch.setattr(DecoderLayers, "__call__", counted)
    async with serve_on(device, path, **words) as driver:
        batches.clear()  # of the engine's start
        in_one_call = await generated(driver)
    assert max(batches) == 3, "no step of the whole batch was one call"
    batches.clear()
    monkeypatch.setattr(Decoder, "of", lambda *_: None)
    async with serve_on(device, path, **words) as driver:
        assert await generated(driver) == in_one_call
    assert not batches


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "deepseek_v3"])
async def test_other_layers_stay_separate(
    family: str,
    make_checkpoint: Callable[..., Any],
    serve_on: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms after each part, experts, latents."""
    monkeypatch.setattr(DecoderLayers, "__call__", None)
    async with serve_on(choose_device("cpu"), make_checkpoint(family).path) as driver:
        assert all(len(tokens) == 10 for tokens in await generated(driver))


async def test_steps_that_read_much_kv_release_the_gil(
    make_checkpoint: Callable[..., Any], serve_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load()
    assert library is not None
    monkeypatch.setattr(decoder_layers, "_MAX_GIL_HELD_NBYTES", 0)
    functions = library.gil_held["decode_layers"]
    monkeypatch.setitem(library.gil_held, "decode_layers", dict.fromkeys(functions))  # cannot be called
    async with serve_on(choose_device("cpu"), make_checkpoint("llama").path) as driver:
        assert all(len(tokens) == 10 for tokens in await generated(driver))
