"""Runs the sequences of one request side by side and hands on what each of them adds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from moonpool.conductor.api.choice import Choice, Delta
from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.errors import RequestFailed
from moonpool.conductor.observing.request_metrics import SequenceClock
from moonpool.conductor.request import GenerateRequest

# Of one HTTP request; more wait their turn, so that a large batch is not turned away for its size alone.
MAX_PARALLEL = 64


@dataclass(slots=True)
class SequenceRun:
    """One choice on its way through the core. ``leader``: another choice of the same prompt, asked first."""

    request: GenerateRequest
    choice: Choice
    leader: SequenceRun | None = None
    has_token: asyncio.Event = field(default_factory=asyncio.Event)
    clock: SequenceClock | None = None


Sink = Callable[[SequenceRun, Delta], Awaitable[None]]


async def run_all(runs: Sequence[SequenceRun], sink: Sink, context: ApiContext, arrived_s: float) -> None:
    """Generate every run to its end, awaiting ``sink`` with each addition in its order.

    The first error of any run is raised after all others have been cancelled everywhere; so are all when this
    call is cancelled or ``sink`` raises.
    """
    places = asyncio.Semaphore(MAX_PARALLEL)
    if len(runs) == 1:  # no task of its own, no switch between tasks a token
        await _run(runs[0], sink, context, arrived_s, places)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(_run(run, sink, context, arrived_s, places))
    except BaseExceptionGroup as several:
        raise _first(several) from None


async def _run(
    run: SequenceRun, sink: Sink, context: ApiContext, arrived_s: float, places: asyncio.Semaphore
) -> None:
    if run.leader is not None:
        # The leader's prompt is in the cache by then, so it is computed once and not n times.
        await run.leader.has_token.wait()
    num_prompt_tokens = len(run.choice.prompt.token_ids)
    run.clock = clock = SequenceClock(context.metrics, arrived_s, num_prompt_tokens)
    async with places, _timed(clock, context.clock) as outcome:
        async with aclosing(context.conductor.generate(run.request)) as events:
            async for event in events:
                if event.token_id >= 0:
                    clock.token(context.clock(), event.num_cached_tokens)
                run.has_token.set()
                delta = run.choice.push(event)
                await sink(run, delta)
                if delta.finish_reason is not None:
                    outcome.reason = delta.finish_reason
                    return
        raise RequestFailed("the stream of tokens ended without a reason", 1, clock.num_tokens)


@dataclass(slots=True)
class _Outcome:
    reason: str = "cancelled"


@asynccontextmanager
async def _timed(clock: SequenceClock, now: Callable[[], float]) -> AsyncIterator[_Outcome]:
    outcome = _Outcome()
    clock.begin()
    try:
        yield outcome
    except Exception as error:
        # A write to a connection that the client has closed is its way of cancelling.
        outcome.reason = "cancelled" if isinstance(error, ConnectionError) else type(error).__name__
        raise
    finally:
        clock.end(now(), outcome.reason)


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    first = several.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
