"""A step's batch in pieces that follow each other through the stages of a pipeline."""

from __future__ import annotations

from itertools import pairwise

from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.ranks.partition.batch_slice import BatchSlice, TokenRange


def cut(inputs: StepInputs, num_stages: int, max_tokens: int) -> list[BatchSlice]:
    """The batch in the order of its tokens: decodes in ``num_stages`` parts, prompts in pieces of at most
    ``max_tokens``. A long chunk is cut too: a piece reads what those before it wrote, as chunks do."""
    n = inputs.num_decodes
    starts = [] if inputs.chunk_starts is None else inputs.chunk_starts.tolist()
    if num_stages == 1:
        return [BatchSlice(range(n), _runs(starts, range(starts[-1] if starts else 0)))]
    pieces = [BatchSlice(range(n * i // num_stages, n * (i + 1) // num_stages)) for i in range(num_stages)]
    if starts:
        pieces += [
            BatchSlice(range(0), _runs(starts, range(first, min(first + max_tokens, starts[-1]))))
            for first in range(0, starts[-1], max_tokens)
        ]
    return [piece for piece in pieces if len(piece)]


def _runs(starts: list[int], tokens: range) -> tuple[TokenRange, ...]:
    """The runs of chunks that ``tokens`` of the batch's prompts are; starts: cumulative, of the chunks."""
    return tuple(
        TokenRange(chunk, max(first, tokens.start), min(end, tokens.stop))
        for chunk, (first, end) in enumerate(pairwise(starts))
        if max(first, tokens.start) < min(end, tokens.stop)
    )
