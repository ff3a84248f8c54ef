"""Prompts as token ids, drawn from a seed: a run can be repeated exactly."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from moonpool.runtime.errors import ConfigError

# Ordinary word pieces of byte-level vocabularies: above bytes and marks, below the end of the smallest.
FIRST_ID, LAST_ID = 300, 1999
# One token each, with the space before them, in most vocabularies.
_WORDS = "the of and to in a is that for it was on are as with his they".split()  # noqa: SIM905


class Prompts:
    """Draw prompts. Their common prefix is ``shared_prefix_tokens`` long.

    purpose: cases differ in it, so that none finds another's prompts in the cache.
    """

    def __init__(self, seed: int, purpose: str, shared_prefix_tokens: int = 0) -> None:
        self._rng = random.Random(f"{purpose} {seed}")
        self._shared = self.tokens(shared_prefix_tokens)

    def tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(FIRST_ID, LAST_ID + 1), k=count)

    def draw(self, count: int) -> list[int]:
        """A prompt of ``count`` tokens, the shared ones included."""
        return self._shared[:count] + self.tokens(count - len(self._shared))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids of the first prompt, and of those that each later turn adds."""

    first: list[int]
    later: tuple[list[int], ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """``requests`` conversations of ``turns`` requests each. Lengths in tokens.

    Give ``concurrency`` for a closed loop (that many conversations at a time) or ``rate`` (conversations a
    second, Poisson arrivals, however many are open).
    """

    requests: int = 64
    concurrency: int = 8
    rate: float = 0.0
    prompt_tokens: int = 128
    output_tokens: int = 128
    shared_prefix_tokens: int = 0  # the first tokens of every prompt
    turns: int = 1
    turn_tokens: int = 32  # a later turn's own tokens, behind the conversation so far
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "prompt_tokens", "output_tokens", "turns", "turn_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.shared_prefix_tokens < self.prompt_tokens:
            raise ConfigError(
                f"shared_prefix_tokens must be from 0 to prompt_tokens - 1, got {self.shared_prefix_tokens}"
            )

    def conversations(self) -> list[Conversation]:
        prompts = Prompts(self.seed, "load", self.shared_prefix_tokens)
        return [
            Conversation(
                prompts.draw(self.prompt_tokens),
                tuple(prompts.tokens(self.turn_tokens) for _ in range(1, self.turns)),
                self.output_tokens,
            )
            for _ in range(self.requests)
        ]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The fields of a request.

    plain: only OpenAI's own. Prompts are then text of about as many tokens, and an answer may end early.
    """

    model: str
    plain: bool = False
    more: Mapping[str, object] = field(default_factory=dict)

    def body(self, prompt: Sequence[int], output_tokens: int, **more: object) -> bytes:
        """A greedy streamed completion of exactly ``output_tokens`` tokens (at most, when plain).

        more: fields of this request.
        """
        fields: dict[str, object] = {
            "model": self.model,
            "prompt": as_text(prompt) if self.plain else list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.plain:
            fields |= {"ignore_eos": True, "return_token_ids": True, **self.more}
        return orjson.dumps(fields | more)


def as_text(prompt: Sequence[int]) -> str:
    """Words of about as many tokens."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in prompt)
