"""The cost of token masks: decode steps of sequences with a structure, beside the same steps without."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moonpool.bench.engine.driver import DecodeSteps, session
from moonpool.bench.harness.turns import spread
from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.reports.report import Row, versus
from moonpool.runtime.structure.automaton import Automaton
from moonpool.runtime.structure.grammars import Grammars, Structure

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["one", "another", "a third one"]},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "count", "tags"],
    "additionalProperties": False,
}
# Objects without an end: one a line.
_LINES = Structure("grammar", f'start: line ("\\n" line)*\nline: %json {json.dumps(_SCHEMA)}')
_CONTEXT = 64
_NUM_MASKS = 500


async def rows(
    directory: Path,
    options: EngineOptions,
    device: str,
    batches: tuple[int, ...],
    num_steps: int,
    rounds: int,
) -> list[Row]:
    """``directory``: a checkpoint with its tokenizer."""
    config = ModelConfig.from_checkpoint(directory)
    grammars = Grammars(directory, config.vocab_size, config.eos_token_ids)
    began_s = time.perf_counter()
    await grammars.check(_LINES)
    name = f"vocabulary of {config.vocab_size}"
    first_s = time.perf_counter() - began_s
    fills = _mask_seconds(await grammars.automaton(_LINES), config.vocab_size)
    found = [
        Row(name, "tokenizer and first structure", 1e3 * first_s, "ms"),
        Row(name, "one mask, median", 1e6 * statistics.median(fills), "µs"),
        Row(name, "one mask, longest", 1e6 * max(fills), "µs"),
    ]
    # Drawn, so that both kinds of step sample in the same way.
    drawn = Sampling(temperature=1.0, seed=1, ignore_eos=True)
    masked = replace(drawn, structure=_LINES, min_tokens=1 << 20)
    async with session(config, options, device, "bfloat16") as running:
        for batch in batches:
            plain, structured = list[DecodeSteps](), list[DecodeSteps]()
            for _ in range(rounds):
                plain.append(await running.decode(batch, _CONTEXT, num_steps, drawn))
                automata = [await grammars.automaton(_LINES) for _ in range(batch)]
                structured.append(await running.decode(batch, _CONTEXT, num_steps, masked, automata))
            found.append(step_row(f"{name}, decode, batch {batch}", structured, plain))
    return found


def step_row(case: str, masked: Sequence[DecodeSteps], plain: Sequence[DecodeSteps]) -> Row:
    """``masked``, ``plain``: of the same rounds, in turn."""
    seconds, without = ([steps.step_s for steps in each] for each in (masked, plain))
    row = versus(
        spread(case, "step with masks", seconds, "ms", 1e3), "without", 1e3 * statistics.median(without)
    )
    ratio = statistics.median(mine / theirs for mine, theirs in zip(seconds, without, strict=True))
    return replace(row, ratio=ratio)


def _mask_seconds(automaton: Automaton, vocab_size: int) -> list[float]:
    """Seconds of each mask along a text of random allowed tokens."""
    rng, ids, seconds = np.random.default_rng(0), list[int](), list[float]()
    for _ in range(_NUM_MASKS):
        tokens = np.array(ids, np.int32)
        began_s = time.perf_counter()
        automaton.fill(tokens, may_end=False)
        seconds.append(time.perf_counter() - began_s)
        bits = np.unpackbits(automaton.mask.view(np.uint8), bitorder="little", count=vocab_size)
        ids.append(int(rng.choice(np.flatnonzero(bits))))
    return seconds
