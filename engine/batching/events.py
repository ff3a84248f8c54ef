"""What one step tells those who asked for the work."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.engine.batching.sequence import FinishReason, Sequence, TokenLogprobs

__all__ = ["StepEvent", "TokenLogprobs"]


@dataclass(slots=True)
class StepEvent:
    """What a step did to one sequence. Fields without news hold their defaults.

    The KV of the sequence's first ``num_computed_tokens`` tokens is in the pool, in the blocks its table
    names at this moment (a table entry may be replaced by an equal block later, never during ``on_step``).
    """

    sequence: Sequence
    num_computed_tokens: int
    token_id: int = -1  # -1: no token
    index: int = -1  # of the token; 0 is the first after the prompt
    finish_reason: FinishReason = FinishReason.NONE
    logprobs: TokenLogprobs | None = None  # where asked for
    preempted: bool = False  # its blocks were taken for others and are computed again; nothing is lost
    error: str = ""  # with FinishReason.ERROR: what happened
    prompt_logprobs: list[TokenLogprobs] | None = None  # of tokens 1 … n-1; with the first token
