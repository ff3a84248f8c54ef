"""Texts that a model with equally likely tokens would write within a structure."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from moonpool.runtime.structure.automaton import Automaton
from moonpool.runtime.structure.grammars import Grammars, Structure


def allowed(automaton: Automaton, vocab_size: int) -> list[int]:
    """The tokens of its mask."""
    bits = np.unpackbits(automaton.mask.view(np.uint8), bitorder="little", count=vocab_size)
    return np.flatnonzero(bits).tolist()


class Writer:
    """Writes with the tokenizer of a checkpoint."""

    def __init__(self, path: Path, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self.grammars = Grammars(path, vocab_size, end_ids)
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.vocab_size, self.end_ids = vocab_size, end_ids

    async def write(
        self, structure: Structure, seed: int = 0, max_tokens: int = 400, hurry: int = 24
    ) -> tuple[list[int], bool]:
        """Token ids without the end, and whether they are complete. After ``hurry`` tokens it ends where it
        may, and avoids white space."""
        rng = random.Random(seed)
        automaton = await self.grammars.automaton(structure)
        ids: list[int] = []
        for index in range(max_tokens):
            automaton.fill(np.array(ids, np.int32))
            assert not automaton.error, automaton.error
            choices = allowed(automaton, self.vocab_size)
            if index >= hurry and any(i in self.end_ids for i in choices):
                return ids, True
            if index >= hurry:
                choices = [i for i in choices if self.tokenizer.decode([i]).strip()] or choices
            token_id = rng.choice(choices)
            if token_id in self.end_ids:
                return ids, True
            ids.append(token_id)
        return ids, False

    async def accepts(self, structure: Structure, text: str) -> bool:
        """Whether a model may write the text, and end there."""
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        automaton = await self.grammars.automaton(structure)
        automaton.fill(ids)
        return not automaton.error and any(i in self.end_ids for i in allowed(automaton, self.vocab_size))

    async def text(self, structure: Structure, seed: int = 0, **bounds: int) -> str:
        """A complete text."""
        ids, complete = await self.write(structure, seed, **bounds)
        assert complete, self.tokenizer.decode(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False)
