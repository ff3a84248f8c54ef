"""A cascade: a cheap model answers first, and its answer counts if it was sure enough of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moonpool.conductor.api.choice import Delta
from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.sequence_runs import SequenceRun, Sink, run_all
from moonpool.runtime.config.routes import Cascade
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.service.vital import cancel_and_wait


class Draft:
    """The answer of one model, held until it is known whether it counts: by its first ``after_tokens``
    tokens, or by all. It goes on meanwhile, and afterwards, until ``drop``. ``seconds``: how long it ran,
    once it has ended.
    """

    def __init__(self, runs: Sequence[SequenceRun], cascade: Cascade, *, logprobs: bool) -> None:
        """``runs``: their requests ask for log-probabilities. ``logprobs``: the client asked, too."""
        self.seconds = 0.0
        self._runs, self._cascade, self._logprobs = runs, cascade, logprobs
        self._cause = ""
        self._values: list[float] = []
        self._held: dict[int, Delta] = {}  # by choice
        self._unread = {run.choice.index for run in runs}  # choices that are not judged by yet
        self._judged = asyncio.Event()
        self._sink: Sink | None = None
        self._task: asyncio.Task[None] | None = None

    async def judge(self, context: ApiContext, arrived_s: float) -> str:
        """Begin, and return why the answer does not count; empty: it does. An error of the model before that
        is a cause, not raised."""
        self._task = asyncio.create_task(self._run(context, arrived_s))
        await self._judged.wait()
        return self._cause

    def held_s(self, now_s: float) -> float:
        """How long its first token has been there."""
        clocks = [run.clock for run in self._runs if run.clock is not None and run.clock.num_tokens]
        return now_s - min((clock.first_s for clock in clocks), default=now_s)

    async def deliver(self, sink: Sink) -> None:
        """Give ``sink`` what is held, each choice in one piece, and the rest as it comes.

        Raises as ``run_all``.
        """
        assert self._task is not None and self._judged.is_set()
        by_index = {run.choice.index: run for run in self._runs}
        while self._held:
            index = next(iter(self._held))
            await sink(by_index[index], self._held.pop(index))
        self._sink = sink
        await self._task

    async def drop(self) -> None:
        """End what runs. Idempotent."""
        await cancel_and_wait(self._task)

    async def _run(self, context: ApiContext, arrived_s: float) -> None:
        began_s = context.clock()
        try:
            await run_all(self._runs, self._take, context, arrived_s)
        except MoonpoolError:
            if self._judged.is_set():
                raise
            self._cause = "failed"
        finally:
            self.seconds = context.clock() - began_s
            self._judged.set()

    async def _take(self, run: SequenceRun, delta: Delta) -> None:
        index = run.choice.index
        if index in self._unread:
            own = delta.entries[len(delta.entries) - len(delta.token_ids) :]  # those of the prompt come first
            self._values.extend(entry.logprobs.logprob for entry in own if entry.logprobs is not None)
        if not self._logprobs:
            delta.entries = []
        if self._sink is not None:
            await self._sink(run, delta)
            return
        whole = self._held.setdefault(index, Delta())
        whole.text += delta.text
        whole.token_ids += delta.token_ids
        whole.entries += delta.entries
        whole.calls += delta.calls
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
        if index in self._unread:
            self._look_at(index, whole)

    def _look_at(self, index: int, whole: Delta) -> None:
        """Judge, once there is enough of each choice."""
        ended, enough = whole.finish_reason is not None, self._cascade.after_tokens
        if not ended and not (enough and len(whole.token_ids) >= enough):
            return
        self._unread.remove(index)
        if ended and len(whole.token_ids) < self._cascade.min_tokens:
            self._cause = "short"
        if not self._unread:
            mean = sum(self._values) / len(self._values) if self._values else 0.0
            if not self._cause and mean < self._cascade.least_logprob:
                self._cause = "unsure"
            self._judged.set()
