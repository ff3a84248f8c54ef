"""Verification in every family: whatever is proposed, the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any

import pytest

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.speculation.speculator import Speculator
from moonpool.runtime.config.engine_options import SpeculativeOptions
from tests.engine.conftest import VOCAB_SIZE, Driver, Reference, prompt
from tests.engine.test_families import FAMILIES

SAMPLINGS: Rows[dict[str, Any]] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_p": 0.8, "top_k": 30},
    {"temperature": 1.0, "seed": 5, "min_p": 0.02, "logit_bias": {3: 4.0}},
)


class Script:
    """Proposes the known answers, every ``wrong``-th token of them changed; 0: none."""

    def __init__(self, answers: dict[str, list[int]], wrong: int) -> None:
        self._answers, self._wrong = answers, wrong

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        done = sequence.num_output_tokens
        ids = self._answers[sequence.request_id][done : done + most]
        return [
            (token + 1) % VOCAB_SIZE if self._wrong and (done + i) % self._wrong == 0 else token
            for i, token in enumerate(ids)
        ]


async def answers(driver: Driver) -> dict[str, list[int]]:
    sequences = [
        driver.sequence(prompt(5 + 7 * i, i), request_id=f"r{i}", max_tokens=40, **words)
        for i, words in enumerate(SAMPLINGS)
    ]
    results = await driver.run(*sequences)
    return {s.request_id: result.token_ids for s, result in zip(sequences, results, strict=True)}


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("name", FAMILIES)
async def test_tokens_do_not_depend_on_what_is_proposed(
    name: str, make_checkpoint: Callable[..., Reference], serve: Callable[..., Any]
) -> None:
    family, words = FAMILIES[name]
    path = make_checkpoint(family, **words).path
    async with serve(path) as driver:
        plain = await answers(driver)
        num_plain = driver.num_steps
    for wrong in (0, 3, 1):
        async with serve(path) as driver:
            speculator = Speculator(SpeculativeOptions(method="ngram", num_tokens=5))
            script = Script(plain, wrong)
            speculator._make = lambda script=script: script
            driver.engine._scheduler.speculator = speculator
            assert await answers(driver) == plain, f"every {wrong}. wrong"
            if wrong == 0:
                assert driver.num_steps < num_plain / 2
            for result in driver.results.values():
                # A token is accepted in the step of the one before it; the first is the prefill's.
                accepted = [event.accepted for event in result.events if event.token_id >= 0]
                assert not any(accepted[:2])
                assert sum(accepted) > 25 if wrong == 0 else sum(accepted) < 30
                assert wrong != 1 or not any(accepted)
