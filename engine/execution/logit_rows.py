"""Which tokens of a step have their logits taken, and in which order."""

from __future__ import annotations

from moonpool.engine.batching.step_plan import StepPlan
from moonpool.engine.execution.runner import LOGIT_ROWS


def logit_rows(plan: StepPlan) -> list[list[int]]:
    """Rows of the step's tokens, a list for each time the runner asks: for the prompt logprobs of each chunk,
    some rows at a time, and then for all that a token follows."""
    rounds: list[list[int]] = []
    sampled = list(range(len(plan.decodes)))
    first = len(plan.decodes)
    for chunk in plan.chunks:
        sequence = chunk.sequence
        if sequence.prompt_logprobs:
            end = first + min(chunk.num_tokens, sequence.num_prompt_tokens - chunk.start - 1)
            rounds += [list(range(row, min(row + LOGIT_ROWS, end))) for row in range(first, end, LOGIT_ROWS)]
        first += chunk.num_tokens
        if chunk.last:
            sampled.append(first - 1)
    return [*rounds, sampled] if sampled else rounds
