"""What people wrote and were answered, in the log of a conductor that was asked for it."""

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
    """A sink that also remembers, and at the end, however that comes, writes a line for each run: the first
    ``max_chars`` characters of its prompt, and of what it said. With 0 this is ``sink`` itself."""
    if not max_chars:
        yield sink
        return
    said = {id(run): Outcome() for run in runs}

    async def both(run: SequenceRun, delta: Delta) -> None:
        said[id(run)].add(delta)
        await sink(run, delta)

    try:
        yield both
    finally:
        for run in runs:
            outcome, asked = said[id(run)], run.choice.prompt_text()
            answered = "".join(outcome.text)
            log.info(
                "%s was asked %r and said %r (%s)",
                run.request.request_id,
                _beginning(asked, max_chars),
                _beginning(answered, max_chars),
                outcome.finish_reason or "it did not come to its end",
                extra=WHOLE,
            )


def _beginning(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text):,} characters)"
