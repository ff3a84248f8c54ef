"""Structures on several ranks: the texts of one rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from moonpool.engine.batching.sequence import FinishReason
from moonpool.runtime.structure.grammars import Grammars, Structure
from tests.engine.ranks.conftest import serving

DEMO = Path(__file__).parents[3] / "moonpool" / "demo" / "model"
EXPRESSION = r"[A-Z][a-z]{3,9} ist (größer|kleiner) als [0-9]{1,3}\."
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "seed": 4}]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_texts_match_and_are_those_of_one_rank() -> None:
    grammars, structure = Grammars(DEMO, 2048, (1,)), Structure("regex", EXPRESSION)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    answers = []
    for plan in ({}, {"tp": 2}):
        async with serving(DEMO, block_size=16, dtype="float32", **plan) as driver:
            sequences = [
                driver.sequence([0, 2046, 300, 301], structure=structure, max_tokens=60, **words)
                for words in SAMPLINGS
            ]
            for sequence in sequences:
                sequence.automaton = await grammars.automaton(structure)
            results = await driver.run(*sequences)
        assert all(result.finish_reason is FinishReason.STOP for result in results)
        answers.append([tokenizer.decode(result.token_ids) for result in results])
    assert all(re.fullmatch(EXPRESSION, text) for text in answers[0]), answers[0]
    assert answers[0] == answers[1]
