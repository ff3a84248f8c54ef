"""One step, before and after: what is to be computed, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.engine.batching.sequence import Sequence, TokenLogprobs


@dataclass(slots=True)
class Chunk:
    """Prompt tokens [start, start + num_tokens) of a sequence; the last chunk also samples the next token."""

    sequence: Sequence
    start: int
    num_tokens: int
    last: bool


@dataclass(slots=True)
class StepPlan:
    """One step: a token for each decoding sequence, and pieces of prompts with what room is left."""

    decodes: list[Sequence]  # decodes[i].row == i
    chunks: list[Chunk]
    preempted: list[Sequence]
    version: int  # equal in two plans: the same decodes in the same order
    moved_blocks: list[tuple[Sequence, int, int]]  # (sequence, column, block): news of decodes' block tables

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    def sequences(self) -> Iterator[Sequence]:
        yield from self.decodes
        for chunk in self.chunks:
            yield chunk.sequence


@dataclass(slots=True)
class StepOutput:
    """What the tensors said: one token for each of plan.decodes, then one for each last chunk, in plan order.

    logprobs is empty, or as long as token_ids. prompt_logprobs[i] belongs to plan.chunks[i], where asked for.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    model_s: float = 0.0  # seconds the tensors took
