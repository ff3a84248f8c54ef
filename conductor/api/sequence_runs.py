"""Runs the sequences of one HTTP request in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from moonpool.conductor.api.choice import Choice, Delta
from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.errors import RequestFailed
from moonpool.conductor.observing.request_metrics import SequenceClock
from moonpool.conductor.request import GenerateRequest, TokenEvent
from moonpool.runtime.observing import tracing

# Of one HTTP request. More sequences wait, so that a large batch is not rejected for its size.
MAX_PARALLEL = 64


@dataclass(slots=True)
class SequenceRun:
    """One choice and its request. ``leader``: the first choice of the same prompt."""

    request: GenerateRequest
    choice: Choice
    leader: SequenceRun | None = None
    has_token: asyncio.Event = field(default_factory=asyncio.Event)
    clock: SequenceClock | None = None
    ended: bool = False  # its client has all of it: it is not run


Sink = Callable[[SequenceRun, Delta], Awaitable[None]]


async def run_all(runs: Sequence[SequenceRun], sink: Sink, context: ApiContext, arrived_s: float) -> None:
    """Generate every run to its end, awaiting ``sink`` with each addition in order.

    The first error of any run is raised after all others have been cancelled on the nodes. A cancellation, or
    an error of ``sink``, cancels all runs as well.
    """
    runs = [run for run in runs if not run.ended]
    slots = asyncio.Semaphore(MAX_PARALLEL)
    if len(runs) == 1:  # without a task of its own there is no task switch per token
        await _run(runs[0], sink, context, arrived_s, slots)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(_run(run, sink, context, arrived_s, slots))
    except BaseExceptionGroup as several:
        raise _first(several) from None


async def _run(
    run: SequenceRun, sink: Sink, context: ApiContext, arrived_s: float, slots: asyncio.Semaphore
) -> None:
    if run.leader is not None:
        # By then the leader's prompt is in the cache: it is computed once and not n times.
        await run.leader.has_token.wait()
    run.clock = clock = SequenceClock(
        context.metrics,
        arrived_s,
        len(run.choice.prompt.token_ids),
        run.request.request_id,
        tracing.trace_id(),
        run.request.slo(context.metrics.slo),
    )
    async with slots:
        reason, request = "cancelled", run.request
        clock.begin()
        if request.deadline_s is not None:  # of the whole API request
            left_s = request.deadline_s - (context.clock() - arrived_s)
            request = replace(request, deadline_s=max(left_s, 0.0))
        try:
            for index, token_id in enumerate(request.output_ids):
                await sink(run, run.choice.push(TokenEvent(index, token_id)))
            async with aclosing(context.conductor.generate(request)) as events:
                async for event in events:
                    if event.token_id >= 0:
                        clock.token(context.clock(), event.num_cached_tokens, accepted=event.accepted)
                    run.has_token.set()
                    came_s = context.clock()
                    delta = run.choice.push(event)
                    read_s = context.clock()
                    try:
                        await sink(run, delta)
                    finally:
                        taken_s = context.clock()
                        request.delivery.add(detokenize_s=read_s - came_s, stream_s=taken_s - read_s)
                    if delta.finish_reason is not None:
                        reason = delta.finish_reason
                        return
            raise RequestFailed("the stream of tokens ended without a reason", 1, clock.num_tokens)
        except ConnectionError:
            raise  # clients cancel by closing the connection
        except Exception as error:
            reason = type(error).__name__
            raise
        finally:
            clock.end(context.clock(), reason)


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    first = several.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
