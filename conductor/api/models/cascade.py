"""A cascade: a cheap model answers first, and its answer counts if it was sure enough of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.conductor.api.choice import Delta
from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.sequence_runs import SequenceRun, run_all
from moonpool.runtime.config.routes import Cascade
from moonpool.runtime.errors import MoonpoolError


@dataclass(slots=True)
class Draft:
    """The whole answer of one model. ``cause``: why it does not count; empty: it does."""

    deltas: dict[int, Delta] = field(default_factory=dict)  # by choice
    cause: str = ""
    mean_logprob: float = 0.0


async def draft(
    runs: Sequence[SequenceRun], context: ApiContext, arrived_s: float, cascade: Cascade, *, logprobs: bool
) -> Draft:
    """Run all ``runs``, whose requests ask for log-probabilities, to their ends, and judge them.

    ``logprobs``: the client asked for them, too. An error of the model is a cause, not raised.
    """
    made = Draft()
    values: list[float] = []

    async def keep(run: SequenceRun, delta: Delta) -> None:
        values.extend(entry.logprobs.logprob for entry in delta.entries if entry.logprobs is not None)
        if not logprobs:
            delta.entries = []
        whole = made.deltas.setdefault(run.choice.index, Delta())
        whole.text += delta.text
        whole.token_ids += delta.token_ids
        whole.entries += delta.entries
        whole.calls += delta.calls
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason

    try:
        await run_all(runs, keep, context, arrived_s)
    except MoonpoolError:
        made.cause = "failed"
        return made
    made.mean_logprob = sum(values) / len(values) if values else 0.0
    if any(len(delta.token_ids) < cascade.min_tokens for delta in made.deltas.values()):
        made.cause = "short"
    elif made.mean_logprob < cascade.least_logprob:
        made.cause = "unsure"
    return made
