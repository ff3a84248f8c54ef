"""The engine's main loop: schedule, run, postprocess, report."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

from prometheus_client import Histogram

from moonpool.engine.batching.reservations import Reservations
from moonpool.engine.batching.scheduler import Scheduler
from moonpool.engine.batching.sequence import FinishReason, Sequence, State
from moonpool.engine.batching.step_plan import StepEvent, StepOutput, StepPlan
from moonpool.engine.device.device import Launched
from moonpool.engine.errors import DeviceLost, RankLost
from moonpool.engine.execution.cost_profile import StepCosts
from moonpool.engine.execution.runner import ModelRunner, Step

Result = TypeVar("Result")

log = logging.getLogger(__name__)

_MODEL_SECONDS = Histogram(
    "moonpool_model_seconds",
    "Seconds of a step's tensors, by kind: decode, or prefill for steps with any part of a prompt",
    ["kind"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
DEVICE_IDLE_SECONDS = Histogram(
    "moonpool_device_idle_seconds",
    "Seconds from the end of a step to the launch of the next one, while there is work; 0: launched before",
    buckets=(0.0, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1),
)
_STEP_TOKENS = Histogram(
    "moonpool_step_tokens",
    "Tokens of a step, by kind: of prompts, decoded (one of each sequence), speculated (proposed to follow)",
    ["kind"],
    buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
)
# Bound once: looking a label up costs more than the observation.
PREFILL_SECONDS = _MODEL_SECONDS.labels("prefill")
DECODE_SECONDS = _MODEL_SECONDS.labels("decode")
PROMPT_TOKENS, DECODED_TOKENS, SPECULATED_TOKENS = map(
    _STEP_TOKENS.labels, ("prompt", "decoded", "speculated")
)

# A shorter step runs on the event loop's thread: the way to the worker and back takes 0.1 ms on an idle
# machine and several on a busy one. Not on a GPU, where the time is spent waiting.
INLINE_STEP_S = 0.004


@dataclass(slots=True)
class _Flight:
    """A step that is or will be launched. ``launched`` returns it, or raises the error of the launch."""

    plan: StepPlan
    begun_s: float
    predicted_s: float
    launched: Callable[[], Launched[Step]]
    failed: bool = False  # to launch, as is known already


class StepLoop:
    """Runs steps while there is work, sleeps otherwise.

    A pipeline has a step of each micro-batch in flight: see ``_run_pipeline``.

    On a GPU a step that only decodes is launched before the tokens of the one before are on the host: they
    are fed on the device. Where a sequence has ended meanwhile, its next token is dropped.

    ``sequences``: all unfinished ones; a finished sequence is removed before ``report`` is called.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        reservations: Reservations,
        runner: ModelRunner,
        costs: StepCosts,
        worker: ThreadPoolExecutor,
        clock: Callable[[], float],
        report: Callable[[list[StepEvent]], None],
    ) -> None:
        self.scheduler = scheduler
        self.reservations = reservations
        self.runner = runner
        self.costs = costs
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.outbox: list[StepEvent] = []  # events that happened between steps
        self.closing = False
        self.ended_in: list[Sequence] = []  # those of the step in which a rank or the device was lost
        self.num_steps = 0
        self.num_failed_steps = 0
        self.step_s = 0.0
        self.busy_s = 0.0  # with work to do: all of it is charged to sequences, a step's until its end
        self._worker = worker
        self._clock = clock
        self._report = report
        self._wake = asyncio.Event()
        self._in_flight: list[StepPlan] = []
        self._charged_s = clock()  # time is charged up to here
        self._ended_s: float | None = None  # of the step before; None: there was no work in between
        self._error: RankLost | None = None

    def fail(self, error: RankLost) -> None:
        """Make ``run`` raise ``error``, without reporting an end of any sequence."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Wake the loop: there may be work."""
        self._wake.set()

    def is_stepping(self, sequence: Sequence) -> bool:
        """Return whether a running step uses the sequence's blocks."""
        return any(s is sequence for plan in self._in_flight for s in plan.sequences())

    async def run(self) -> None:
        """Run until ``closing``; then every sequence ends as CANCELLED.

        Raises RankLost, DeviceLost, and errors of ``report`` and of the bookkeeping, after which it cannot be
        trusted. The sequences have not ended then and must be computed elsewhere.
        """
        events: list[StepEvent] = []  # of the last step, not reported yet
        while not self.closing:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            self._grant()
            plan = self.scheduler.schedule()
            if plan is None:
                self._publish(events)
                events, self._ended_s = [], None
                await self._wake.wait()
                self._charged_s = self._clock()
                continue
            if not plan.decodes and not plan.chunks:
                # All running sequences were preempted and wait for blocks.
                self._publish([*events, *plan.preemptions()])
                events = []
                continue
            if len(self.scheduler.micro_batches) > 1:
                events = await self._run_pipeline(plan, events)
                continue
            self._in_flight = [plan]
            events = await self._draft(plan, events)
            begun_s, predicted_s = self._clock(), self.costs.predict_s(plan)
            for chunk in plan.chunks:
                chunk.sequence.scheduled_s = chunk.sequence.scheduled_s or begun_s
            await self.scheduler.pool.ready()
            if self.runner.device.runs_ahead and self.runner.is_single_rank:
                events = await self._run_ahead(plan, events)
            elif predicted_s > INLINE_STEP_S or not self.runner.is_single_rank:
                try:
                    result = await self._in_worker(partial(self._execute, plan), events)
                finally:
                    self._in_flight = []
                # Reported while the next step runs.
                events = self._postprocess(plan, begun_s, predicted_s, result)
            else:
                self._publish(events)
                own_events = self._postprocess(plan, begun_s, predicted_s, partial(self._execute, plan))
                self._in_flight = []
                self._publish(own_events)
                events = []
                # Let the loop serve its sockets between two steps.
                await asyncio.sleep(0)
        for sequence in list(self.sequences.values()):
            if sequence.state is not State.FINISHED:
                self.scheduler.finish(sequence, FinishReason.CANCELLED, events)
        self._publish(events)

    def _grant(self) -> None:
        """Grant blocks to waiting reservations, in order with the waiting sequences."""
        waiting, first = self.scheduler.waiting, self.reservations.first
        if first is None:
            self.scheduler.admission_paused = False
            return
        # Preempted sequences come before sequences that have not started.
        is_next = not waiting or (not waiting[0].num_preemptions and first.order < waiting[0].order)
        if is_next:
            self.reservations.grant(until=waiting[0].order if waiting else None)
        # Younger sequences must not take the room it waits for.
        self.scheduler.admission_paused = is_next and self.reservations.first is first

    async def _draft(self, plan: StepPlan, events: list[StepEvent]) -> list[StepEvent]:
        """Add proposed tokens to a plan that only decodes. Return the events of the step before, none if they
        were reported meanwhile."""
        speculator = self.scheduler.speculator
        if speculator is None or plan.chunks:
            return events
        propose, proposing_s = partial(speculator.propose, plan.decodes), speculator.proposing_s(plan.decodes)
        if proposing_s > (0.0 if self.runner.device.runs_ahead else INLINE_STEP_S):
            drafts = (await self._in_worker(propose, events))()
            events = []
        else:
            drafts = propose()
        self.scheduler.add_drafts(plan, drafts)
        return events

    async def _run_ahead(self, plan: StepPlan, events: list[StepEvent]) -> list[StepEvent]:
        """Run the plan, and the steps that follow while each can be launched before the last one has ended.
        Return the events of the last one; report the others, and first ``events``."""
        flight: _Flight | None = await self._launch(plan, None)
        try:
            while flight is not None:
                later = None
                stops = flight.failed or self.closing or self._error is not None
                if not stops and not len(self.reservations):
                    ahead = self.scheduler.schedule_ahead(flight.plan)
                    if ahead is not None:
                        self._in_flight.append(ahead)
                        await self.scheduler.pool.ready()
                        later = await self._launch(ahead, flight)
                ending, flight = flight, later
                result = await self._in_worker(partial(self.runner.finish, ending.launched), events)
                events = self._postprocess_flight(ending, result, in_flight=later is not None)
        finally:
            if flight is not None:
                # After an error: nothing may use the pool's memory any more.
                ending = flight
                rest = self._on_worker(partial(self.runner.finish, ending.launched))
                await asyncio.gather(rest, return_exceptions=True)
            self._in_flight = []
            self.scheduler.step_ended(in_flight=False)
        return events

    async def _run_pipeline(self, plan: StepPlan, events: list[StepEvent]) -> list[StepEvent]:
        """Run the plan, and beside it a step of each other micro-batch, as long as any can go on. Return the
        events of the last one; report the others, and first ``events``.

        A thread runs them all: it launches each, which computes this rank's layers, and then finishes the
        one launched first: its other layers have been computed meanwhile.
        """
        flights: deque[_Flight] = deque()
        next_plan: StepPlan | None = plan
        try:
            while next_plan is not None or flights:
                while next_plan is not None:
                    self._in_flight.append(next_plan)
                    await self.scheduler.pool.ready()
                    flights.append(self._planned(next_plan))
                    next_plan = self._schedule_beside()
                result = await self._in_worker(partial(self._end_first, list(flights)), events)
                ending = flights.popleft()
                events = self._postprocess(ending.plan, ending.begun_s, ending.predicted_s, result)
                del self._in_flight[0]
                next_plan = self._schedule_beside()
        finally:
            self._in_flight = []
        return events

    def _planned(self, plan: StepPlan) -> _Flight:
        begun_s = self._clock()
        for chunk in plan.chunks:
            chunk.sequence.scheduled_s = chunk.sequence.scheduled_s or begun_s
        return _Flight(plan, begun_s, self.costs.predict_s(plan), cache(partial(self.runner.launch, plan)))

    def _schedule_beside(self) -> StepPlan | None:
        """Return a step that can run beside those in flight; None: there is none, or none is in flight."""
        full = len(self._in_flight) >= len(self.scheduler.micro_batches)
        if not self._in_flight or full or self.closing or self._error is not None:
            return None
        # Its logits come in several parts, and the last stage waits until we have taken some.
        if any(chunk.sequence.prompt_logprobs for plan in self._in_flight for chunk in plan.chunks):
            return None
        self._grant()
        return self.scheduler.schedule(self._in_flight)

    def _end_first(self, flights: list[_Flight]) -> StepOutput:
        """Launch those that are not, and finish the first. In a thread."""
        for flight in flights:
            flight.launched()
        output = self.runner.finish(flights[0].launched)
        begun_s, before_s, self._ended_s = flights[0].begun_s, self._ended_s, self._clock()
        if before_s is None or before_s <= begun_s:
            output.model_s = self._ended_s - begun_s
        else:  # the steps in flight share the time
            output.model_s = len(flights) * (self._ended_s - before_s)
        return output

    async def _launch(self, plan: StepPlan, before: _Flight | None) -> _Flight:
        begun_s, predicted_s = self._clock(), self.costs.predict_s(plan)
        launching = self._on_worker(partial(self._launch_now, plan, before))
        await asyncio.wait((launching,))
        return _Flight(plan, begun_s, predicted_s, launching.result, launching.exception() is not None)

    def _launch_now(self, plan: StepPlan, before: _Flight | None) -> Launched[Step]:
        if before is None:
            if self._ended_s is not None:
                DEVICE_IDLE_SECONDS.observe(max(0.0, self._clock() - self._ended_s))
            return self.runner.launch(plan)
        launched = self.runner.launch(plan, before.launched().result.sampled)
        DEVICE_IDLE_SECONDS.observe(0.0)
        return launched

    def _postprocess_flight(
        self, flight: _Flight, result: Callable[[], StepOutput], *, in_flight: bool
    ) -> list[StepEvent]:
        del self._in_flight[0]
        self.scheduler.step_ended(in_flight=in_flight)
        begun_s = max(flight.begun_s, self._ended_s or 0.0)

        def timed() -> StepOutput:
            output = result()
            self._ended_s = self._clock()
            output.model_s = self._ended_s - begun_s
            return output

        return self._postprocess(flight.plan, begun_s, flight.predicted_s, timed)

    def _on_worker(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._worker, work)

    async def _in_worker(self, work: Callable[[], Result], events: list[StepEvent]) -> Callable[[], Result]:
        """Do the work, and meanwhile report the events of the step before."""
        step = self._on_worker(work)
        try:
            self._publish(events)
        finally:
            # Also after an error: the engine's end frees the pool's memory.
            await asyncio.wait((step,))
        return step.result

    def _postprocess(
        self, plan: StepPlan, begun_s: float, predicted_s: float, result: Callable[[], StepOutput]
    ) -> list[StepEvent]:
        """Postprocess the step's results. A failure to compute them ends the sequences of this step only."""
        try:
            output = result()
        except (RankLost, DeviceLost) as error:
            plans = self._in_flight if len(self.scheduler.micro_batches) > 1 else [plan]
            self.ended_in = [sequence for each in plans for sequence in each.sequences()]
            raise self._error or error from None
        except Exception as error:
            log.exception("a step failed; requests that end with it: %s", _request_ids(plan))
            self.num_failed_steps += 1
            events = self._fail(plan, error)
            self._charge(plan, self._clock(), 0.0, events)
            return events
        ended_s = self._clock()
        events = self.scheduler.postprocess(plan, output, ended_s)
        seconds = self._charge(plan, ended_s, output.exchange_s, events)
        if self.scheduler.speculator is not None and not plan.chunks:
            self.scheduler.speculator.stepped(plan.decodes, seconds)
        for chunk in plan.chunks:
            chunk.sequence.chunks.append((begun_s, ended_s, chunk.num_tokens))
        self.num_steps += 1
        self.step_s = ended_s - begun_s
        self.costs.correct(plan, predicted_s, output.model_s)
        (PREFILL_SECONDS if plan.chunks else DECODE_SECONDS).observe(output.model_s)
        PROMPT_TOKENS.observe(sum(chunk.num_tokens for chunk in plan.chunks))
        DECODED_TOKENS.observe(len(plan.decodes))
        SPECULATED_TOKENS.observe(sum(draft.num_tokens for draft in plan.drafts))
        return events

    def _charge(self, plan: StepPlan, ended_s: float, exchange_s: float, events: list[StepEvent]) -> float:
        """Charge the time since the step before, or since there was work, to the step's sequences. Return
        it, in seconds."""
        seconds, self._charged_s = ended_s - self._charged_s, ended_s
        self.busy_s += seconds
        plan.charge(seconds, min(exchange_s, seconds), events)
        return seconds

    def _execute(self, plan: StepPlan) -> StepOutput:
        """Run the tensors, on either thread."""
        begun_s = self._clock()
        output = self.runner.execute(plan)
        output.model_s = self._clock() - begun_s
        return output

    def _fail(self, plan: StepPlan, error: Exception) -> list[StepEvent]:
        events = plan.preemptions()
        message = f"{type(error).__name__}: {error}"
        for sequence in plan.sequences():
            if sequence.state is not State.FINISHED:
                self.scheduler.finish(sequence, FinishReason.ERROR, events, message)
        return events

    def _publish(self, events: list[StepEvent]) -> None:
        if self.outbox:
            events = self.outbox + events
            self.outbox = []
        if not events:
            return
        for event in events:
            if event.finish_reason and event.sequence.state is State.FINISHED:
                self.sequences.pop(event.sequence.key, None)
        self._report(events)


def _request_ids(plan: StepPlan) -> str:
    """Return the first request ids of the step, for the log."""
    names = [sequence.request_id for sequence in plan.sequences()]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
