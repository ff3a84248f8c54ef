"""Token masks of a step's structured sequences, computed beside the model's step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import StepPlan


class MaskThread:
    """Fills the automata's masks in a thread, which takes no part in the step. One step at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moonpool-masks")  # started at first use

    def begin(self, plan: StepPlan) -> Callable[[], object]:
        """Begin with the sequences of ``plan`` that sample a token. Return a function that waits for them."""
        sampled = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks if chunk.last)]
        structured = [sequence for sequence in sampled if sequence.automaton is not None]
        if not structured:
            return _done
        return self._thread.submit(_fill, structured).result


def _fill(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        assert sequence.automaton is not None
        may_end = sequence.num_output_tokens >= sequence.sampling.min_tokens
        sequence.automaton.fill(sequence.token_ids[sequence.num_prompt_tokens :], may_end=may_end)


def _done() -> None:
    pass
