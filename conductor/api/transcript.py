"""Prompts and answers in the log, if ``log.prompt_chars`` is set."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moonpool.conductor.api.answer import Outcome
from moonpool.conductor.api.choice import Delta
from moonpool.conductor.api.sequence_runs import SequenceRun, Sink
from moonpool.runtime.observing.log import WHOLE

log = logging.getLogger(__name__)


@contextmanager
def transcribed(runs: Sequence[SequenceRun], sink: Sink, max_chars: int) -> Iterator[Sink]:
    """A sink that also logs each run at its end: the first ``max_chars`` characters of prompt and answer.

    With ``max_chars`` 0 this is ``sink`` itself.
    """
    if not max_chars:
        yield sink
        return
    outputs = {id(run): Outcome() for run in runs}

    async def both(run: SequenceRun, delta: Delta) -> None:
        outputs[id(run)].add(delta)
        await sink(run, delta)

    try:
        yield both
    finally:
        for run in runs:
            outcome, asked = outputs[id(run)], run.choice.prompt_text()
            answered = "".join(outcome.text)
            log.info(
                "%s: prompt %r, answer %r (%s)",
                run.request.request_id,
                _beginning(asked, max_chars),
                _beginning(answered, max_chars),
                outcome.finish_reason or "not finished",
                extra=WHOLE,
            )


def _beginning(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text):,} characters)"
