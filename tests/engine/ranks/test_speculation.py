"""Proposed tokens on several ranks: the tokens of one rank that decodes plainly."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.runtime.config.engine_options import SpeculativeOptions
from tests.engine.conftest import Driver, prompt, proposing
from tests.engine.ranks.conftest import serving
from tests.engine.test_speculation_families import Script

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 5, "top_k": 3},
    {"num_logprobs": 2},
    {"presence_penalty": 0.4},
    {"speculates": False},
]


async def answers(driver: Driver) -> dict[str, list[int]]:
    sequences = [
        driver.sequence(prompt(20 + 9 * i, seed=i), request_id=f"r{i}", max_tokens=60, **words)
        for i, words in enumerate(SAMPLINGS)
    ]
    results = await driver.run(*sequences)
    return {s.request_id: result.token_ids for s, result in zip(sequences, results, strict=True)}


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2, "micro_batch_tokens": 3}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("method", ["ngram", "draft"])
async def test_tokens_are_those_of_plain_decoding_on_one_rank(
    checkpoint: Any, plan: dict[str, Any], method: str
) -> None:
    async with serving(checkpoint.path, max_batch_tokens=64) as driver:
        plain = await answers(driver)
    options = SpeculativeOptions(method=method, num_tokens=5, draft_path=str(checkpoint.path))
    async with serving(checkpoint.path, max_batch_tokens=64, speculative=options, **plan) as driver:
        speculator = proposing(driver.engine)
        if method == "ngram":  # every fourth token is wrong; a draft of the same weights is always right
            speculator._make = lambda: Script(plain, 4)
        assert await answers(driver) == plain
        accepted = [sum(event.accepted for event in result.events) for result in driver.results.values()]
    assert min(accepted[:3]) > (20 if method == "ngram" else 40)
    assert accepted[3:] == [0, 0], "these decode plainly"
