"""Perplexity of the shipped model on a text it has not seen, by the bits of its weights and of its KV."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence, TokenLogprobs
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.engine import Engine
from moonpool.runtime.config.options import EngineOptions, ModelOptions

#: Lincoln at Gettysburg, 1863; from his second inaugural address, 1865. The model read neither.
TEXT = Path(__file__).with_name("held_out.txt")
_PART = 256  # tokens, at most: as many as the model was mainly trained on
#: Name → options.
VARIANTS = {
    "plain weights": EngineOptions(),
    "int8 weights": EngineOptions(weights="int8"),
    "int4 weights": EngineOptions(weights="int4"),
    "fp8_e4m3 KV": EngineOptions(kv_dtype="fp8_e4m3"),
    "int8 KV": EngineOptions(kv_dtype="int8"),
}


async def perplexity(options: EngineOptions, checkpoint: Path | None = None) -> tuple[float, int]:
    """Of the shipped model on a CPU, or of ``checkpoint`` with its tokenizer, and the number of tokens that
    it predicted."""
    model = ModelOptions(device="cpu", path="" if checkpoint is None else str(checkpoint))
    tokenizer = tokenizers.Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    tokens = np.array(tokenizer.encode(TEXT.read_text()).ids, np.int32)
    engine = Engine(model.directory, options, model)
    await engine.start()
    try:
        parts = [tokens[first : first + _PART] for first in range(0, len(tokens) - 1, _PART)]
        logprobs = [token.logprob for token in await prompt_logprobs(engine, parts)]
    finally:
        await engine.close()
    return math.exp(-sum(logprobs) / len(logprobs)), len(logprobs)


async def prompt_logprobs(
    engine: Engine, texts: Iterable[npt.NDArray[np.int32]], num_top: int = 0
) -> list[TokenLogprobs]:
    """Return what a started engine says of each token of the texts but their first ones, one text after the
    other. ``num_top``: most likely tokens in each."""
    found: list[TokenLogprobs] = []
    ended = asyncio.Event()

    def on_step(events: list[StepEvent]) -> None:
        for event in events:
            found.extend(event.prompt_logprobs or ())
            if event.finish_reason:
                ended.set()

    engine.on_step = on_step
    for number, text in enumerate(texts):
        ended.clear()
        engine.add(
            Sequence(
                f"text-{number}",
                0,
                text,
                len(text),
                sampling=Sampling(max_tokens=1, num_logprobs=num_top or -1),
                root_key=b"",
                prompt_logprobs=True,
                arrived_s=float(number),
            )
        )
        await ended.wait()
    return found
