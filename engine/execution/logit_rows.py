"""The rows of a step for logits, in order."""

from __future__ import annotations

from moonpool.engine.batching.step_plan import StepPlan
from moonpool.engine.model.inputs import StepInputs

# Rows of logits made at once for prompt logprobs: float32, so 128 k words × 64 rows are 33 MB.
LOGIT_ROWS = 64


def decode_rows(plan: StepPlan, inputs: StepInputs) -> list[int]:
    """Return the rows of the decodes' newest tokens, then those of the proposed tokens."""
    num_drafted = sum(draft.num_tokens for draft in plan.drafts)
    if not inputs.max_chunk_tokens:
        return list(range(len(plan.decodes) + num_drafted))
    assert inputs.chunk_starts is not None
    first = inputs.chunk_starts.tolist()
    drafted = [first[each.sequence.row] + 1 + i for each in plan.drafts for i in range(each.num_tokens)]
    return first[:-1] + drafted


def logit_rows(plan: StepPlan, inputs: StepInputs) -> list[list[int]]:
    """Return rows of the step's tokens, a list for each request of the runner: first the prompt logprobs of
    each chunk, at most LOGIT_ROWS rows at a time, then all rows that are sampled."""
    rounds: list[list[int]] = []
    sampled = decode_rows(plan, inputs)
    first = len(sampled)
    for chunk in plan.chunks:
        sequence = chunk.sequence
        if sequence.prompt_logprobs:
            end = first + min(chunk.num_tokens, sequence.num_prompt_tokens - chunk.start - 1)
            rounds += [list(range(row, min(row + LOGIT_ROWS, end))) for row in range(first, end, LOGIT_ROWS)]
        first += chunk.num_tokens
        if chunk.last:
            sampled.append(first - 1)
    return [*rounds, sampled] if sampled else rounds
