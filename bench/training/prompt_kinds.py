"""Prompts by template, labelled by whether a small model is enough for their kind.

The labels are a judgement on kinds of prompts, not a measurement of two models: look-ups, small rewritings
and small talk are simple; several steps of reasoning, code, plans and judgements on long texts are not.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.conductor.api.models.facts import Facts

_KINDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SIMPLE: Sequence[str] = _KINDS["simple"]["trained"]
DEMANDING: Sequence[str] = _KINDS["demanding"]["trained"]
# Nothing is fitted or chosen with these.
SIMPLE_HELD_OUT: Sequence[str] = _KINDS["simple"]["held_out"]
DEMANDING_HELD_OUT: Sequence[str] = _KINDS["demanding"]["held_out"]

_WORDS: Mapping[str, Sequence[str]] = _KINDS["words"]
_OPENINGS = ("", "", "", "", "Please help me. ", "Quick question: ", "Hey, ", "I need this for work. ")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Example:
    facts: Facts
    demanding: bool


def examples(
    simple: Sequence[str], demanding: Sequence[str], each: int, rng: random.Random
) -> Iterator[Example]:
    """Yield ``each`` prompts a template. Demanding ones have longer histories, and tools more often."""
    for templates, hard in ((simple, False), (demanding, True)):
        for template in templates:
            for _ in range(each):
                asked = rng.choice(_OPENINGS) + _SLOT.sub(lambda found: _filled(found[1], rng), template)
                turns = rng.choice((1, 1, 1, 2, 3, 6))
                before = sum(rng.randrange(20, 800 if hard else 400) for _ in range(2 * (turns - 1)))
                tools = rng.random() < (0.3 if hard else 0.15)
                yield Example(Facts("", len(asked) + before, tools, 0, "", asked, turns), hard)


def _filled(slot: str, rng: random.Random) -> str:
    if slot in ("number", "small"):
        return str(rng.randrange(20, 900) if slot == "number" else rng.randrange(2, 12))
    return rng.choice(_WORDS[slot])
