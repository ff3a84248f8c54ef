"""One step: its plan, its output, and its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moonpool.engine.batching.sequence import FinishReason, Sequence, TokenLogprobs
from moonpool.runtime.failures import FailureClass

ENDS = -2


@dataclass(slots=True)
class Chunk:
    """Prompt tokens [start, start + num_tokens) of a sequence; the last chunk also samples the next token."""

    sequence: Sequence
    start: int
    num_tokens: int
    last: bool

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return self.sequence.token_ids[self.start : self.start + self.num_tokens]


@dataclass(slots=True)
class Draft:
    """Tokens that may follow those of a decoding sequence, proposed for positions ``start`` and on. Each is
    computed as if it were right, and samples the token after it."""

    sequence: Sequence
    start: int
    proposed: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.proposed)

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return np.array(self.proposed, np.int32)


@dataclass(frozen=True, slots=True)
class Move:
    """A block of a sequence goes into a pack before the step: see ``engine.memory.packing``."""

    sequence: Sequence
    column: int  # of its block table
    block: int
    before: int  # the place of its full layers
    after: int


@dataclass(slots=True)
class StepPlan:
    """One step: a token of each decoding sequence of a micro-batch, with proposals for some of them, or
    prompt chunks in the rest of the token budget."""

    decodes: list[Sequence]  # decodes[i].row == i
    chunks: list[Chunk]
    preempted: list[Sequence]
    version: int  # equal in two plans of a micro-batch with the same decodes in the same order
    moved_blocks: list[
        tuple[Sequence, int, int]
    ]  # (sequence, column, block): changes of the decodes' block tables; block -1: it is in a pack
    after: list[int] | None = None
    """Of a step launched before the last one's tokens are known: for each decode the row of the last step
    that samples its newest token; -1: that is known; ``ENDS``: its sequence ends with the last step, so its
    row computes nothing."""
    drafts: list[Draft] = field(default_factory=list)  # of some of the decodes, in their order
    micro_batch: int = 0  # number of the decodes' ``MicroBatch``
    moves: list[Move] = field(default_factory=list)

    @property
    def runs(self) -> list[Draft | Chunk]:
        """The tokens after those of the decodes, in order: each a run of one sequence."""
        return [*self.drafts, *self.chunks]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(run.num_tokens for run in self.runs)

    @property
    def has_adapters(self) -> bool:
        """Whether any of its sequences has a LoRA adapter."""
        return any(sequence.adapter >= 0 for sequence in self.sequences())

    def charge(self, seconds: float, exchange_s: float, events: list[StepEvent]) -> None:
        """Divide the seconds of the step, which has had these events, among its sequences by their rows.
        ``exchange_s`` of them went to collectives and waiting for other ranks: told of decodes alone."""
        decodes = self.decodes
        if self.after is not None:
            pairs = zip(decodes, self.after, strict=True)
            decodes = [sequence for sequence, row in pairs if row != ENDS]
        row_s = seconds / max(len(decodes) + sum(run.num_tokens for run in self.runs), 1)
        prompts_s = row_s * sum(chunk.num_tokens for chunk in self.chunks)
        for sequence in decodes:
            spent = sequence.spent
            spent.busy_s += row_s
            spent.prompts_s += prompts_s
            spent.exchange_s += exchange_s
        if self.drafts:
            accepted = Counter(event.sequence.key for event in events if event.accepted)
            for draft in self.drafts:
                spent = draft.sequence.spent
                spent.busy_s += draft.num_tokens * row_s
                spent.rejected_s += max(draft.num_tokens - accepted[draft.sequence.key], 0) * row_s
        for chunk in self.chunks:
            spent, num_again = chunk.sequence.spent, chunk.sequence.num_lost_tokens - chunk.start
            spent.busy_s += chunk.num_tokens * row_s
            spent.again_s += min(max(num_again, 0), chunk.num_tokens) * row_s

    def preemptions(self) -> list[StepEvent]:
        return [StepEvent(sequence, 0, preempted=True) for sequence in self.preempted]

    def sequences(self) -> Iterator[Sequence]:
        """One for each decode and each run: sequences with a draft come twice."""
        yield from self.decodes
        for run in self.runs:
            yield run.sequence


@dataclass(slots=True)
class StepOutput:
    """One token for each of plan.decodes, then one for each drafted token, then one for each last chunk, in
    plan order.

    logprobs is empty or as long as token_ids. prompt_logprobs[i] belongs to plan.chunks[i], where requested.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    model_s: float = 0.0
    exchange_s: float = 0.0  # of rank 0: collectives and waiting for other ranks


@dataclass(slots=True)
class StepEvent:
    """The effect of a step on one sequence. Fields without news keep their defaults.

    The KV of the sequence's first ``num_computed_tokens`` tokens is in the pool, in the blocks of its table
    at this moment; -1 stands for blocks that its windows have passed. An equal block may replace a table
    entry later, never during ``on_step``.
    """

    sequence: Sequence
    num_computed_tokens: int
    token_id: int = -1  # -1: no token
    index: int = -1  # of the token; 0 is the first after the prompt
    finish_reason: FinishReason = FinishReason.NONE
    logprobs: TokenLogprobs | None = None  # if requested
    accepted: bool = False  # the token was proposed, and verified in the step of the token before it
    preempted: bool = False  # its blocks were taken and will be computed again
    error: str = ""  # with FinishReason.ERROR or ``ended_life``
    ended_life: bool = False  # the engine ended in a step with this sequence, which has not finished
    lost: FailureClass = FailureClass.GROUP  # with ``ended_life``: what ended it
    prompt_logprobs: list[TokenLogprobs] | None = None  # of tokens 1 … n-1; with the first token
