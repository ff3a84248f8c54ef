"""The lifecycle of one request: place, prefill, decode, finish; placed again when a node fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import NoReturn

from moonpool.conductor.admission.confinement import is_in, refused
from moonpool.conductor.admission.tenants import Tenant, may_hold
from moonpool.conductor.errors import (
    DeadlineExceeded,
    MigrationFailed,
    NoNodes,
    OutsideRegions,
    RequestEndsLives,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
)
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.node_client import RequestKey
from moonpool.conductor.placing.placement import Placement
from moonpool.conductor.request import GenerateRequest, TokenEvent, TokenLogprobs
from moonpool.conductor.requests.attempt import Attempt, AttemptFailed, AttemptInvalid
from moonpool.conductor.requests.deadline import Deadline
from moonpool.conductor.requests.dependencies import RequestDependencies
from moonpool.conductor.requests.life import LOOK_AGAIN_S, QUEUE, REFUSED, Fail, Look, Refuse, RequestLife
from moonpool.conductor.requests.lineage import Lineage
from moonpool.conductor.requests.migration import Migrated
from moonpool.conductor.requests.placer import RequestPlacer
from moonpool.conductor.requests.recorder import Recorder
from moonpool.conductor.requests.suspicion import Suspicion
from moonpool.protos import node_pb2
from moonpool.runtime.failures import FailureClass

log = logging.getLogger(__name__)

_FINISH = {node_pb2.FINISH_STOP: "stop", node_pb2.FINISH_LENGTH: "length"}


class RequestRun:
    """One request, from the first step of ``events`` until it is exhausted or closed.

    Tokens are streamed in order and exactly once: only the token with the next index becomes an event, and a
    new attempt starts from the lineage of streamed tokens.
    """

    def __init__(self, request: GenerateRequest, deps: RequestDependencies) -> None:
        self._request = request
        self._started_s = deps.clock()
        self._deps = deps
        self._recorder = Recorder(request, deps, self._started_s)
        self._lineage = Lineage(request.prompt_token_ids, deps.model.block_size)
        self._lineage.output_ids += request.output_ids
        room = deps.model.max_model_len - self._lineage.num_prompt_tokens
        self._limit = min(request.sampling.max_tokens, room)  # tokens it may produce
        self._deadline = Deadline(
            self._started_s, wait_s=deps.wait_timeout_s, run_s=deps.timeout_s, asked_s=request.deadline_s
        )
        self._life = RequestLife(
            max_attempts=deps.max_attempts, begun=bool(request.output_ids), follows=request.follows
        )
        self._placer = RequestPlacer(
            request,
            deps,
            self._life,
            self._lineage,
            limit=self._limit,
            deadline=self._deadline,
        )
        self._suspicion = Suspicion(deps.suspects)
        self._attempt: Attempt | None = None
        self._timer: asyncio.TimerHandle | None = None  # None: not begun, or ended
        self._admitted = False
        self._ending: Exception | None = None
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """See ``Conductor.generate``."""
        self._set_timer()
        try:
            await self._enter()
            self._check()
            while True:
                await self._suspicion.turn(unless=self._aborted)
                attempt = self._attempt = await self._place()
                try:
                    reply = await attempt.first()
                    self._deps.batch_queue.notify()
                    rejects = partial(self._placer.rejected_before_decode, attempt)
                    if refused_now := self._life.prefilled(len(self._lineage.output_ids), rejects):
                        self._refuse(refused_now)
                    event: TokenEvent | None = self._on_first_token(attempt, reply)
                    while event is None or event.finish_reason is None:
                        if event is not None:
                            yield event
                        event = self._on_token(attempt, await attempt.token())
                    last = self._with_cached(attempt, event)
                    # Before the last event: the consumer may not ask again.
                    self._end(event.finish_reason)
                    yield last
                    return
                except AttemptFailed as failure:
                    await self._failed(failure)
                except AttemptInvalid as useless:
                    raise RequestInvalid(str(useless)) from useless
                finally:
                    attempt.close()
        except Exception as error:
            self._recorder.failed(error)
            self._end(type(error).__name__, error)
            raise
        finally:
            self._end("cancelled")

    def abort(self, error: Exception) -> None:
        """End the request: ``events`` raises ``error``."""
        self._ending = error
        if not self._aborted.done():
            self._aborted.set_result(None)
        if self._attempt is not None:
            self._attempt.abort(error)

    # ------------------------------------------------------------------ migration

    @property
    def decodes_on(self) -> Member | None:
        """See ``Movable``, as for those below."""
        attempt = self._attempt
        return None if attempt is None or attempt.stays else attempt.plan.decode

    @property
    def waits_on(self) -> tuple[Member, bool] | None:
        return None if self._attempt is None else self._attempt.waits_on

    @property
    def priority(self) -> int:
        return self._placer.priority

    @property
    def client(self) -> Tenant:
        return self._request.client

    @property
    def prefill_key(self) -> RequestKey | None:
        return None if self._attempt is None else self._attempt.plan.key

    def place_again(self, reason: str) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.waits_for_prefill:
            attempt.abort(AttemptFailed(FailureClass.NODE, QUEUE, reason, attempt.plan.prefill.node_id))

    def outlook(self) -> tuple[int, int]:
        return self._lineage.num_tokens, self._placer.expected_tokens()

    async def migrate(self, target: Member, cause: str) -> Migrated:
        attempt, request_id = self._attempt, self._request.request_id
        stays = "it is not placed yet" if attempt is None else attempt.stays
        if attempt is not None and attempt.plan.decode is target:
            stays = "it decodes there"
        if self._request.sampling.structure is not None and not target.structures:
            stays = "that node cannot enforce its structure"
        if not may_hold(self.client.regions, target.record.region):
            stays = refused(self.client, "move", f"{target.node_id} {is_in(target.record.region)}")
        if stays or attempt is None:
            raise MigrationFailed(request_id, target.node_id, stays)
        plan = self._placer.migration(attempt, target, cause)
        try:
            moved = await attempt.migrate(plan)
        except MigrationFailed as failure:
            self._recorder.stayed(plan, failure.reason)
            raise
        self._recorder.migrated(moved, self._life.num_attempts, self._placer.spent)
        return moved

    # ------------------------------------------------------------------ placing

    async def _enter(self) -> None:
        deps = self._deps
        self._admitted = await deps.admission.admit(self._request, self.abort, unless=self._aborted)
        if not self._admitted:
            assert self._ending is not None
            raise self._ending
        # A client may reuse an id when it retries. Attempt numbers continue, so that late messages about the
        # former request are not mistaken for this one.
        former, timeline = deps.timelines.get(self._request.request_id), self._recorder.timeline
        if former is not None:
            timeline.first_attempt = former.first_attempt + former.summary.attempts
        self._placer.first_attempt = timeline.first_attempt
        deps.timelines.put(timeline)
        deps.runs[self._request.request_id] = self
        self._recorder.queued(self._lineage.num_prompt_tokens, self._limit)

    def _check(self) -> None:
        if self._limit < 1:
            raise RequestInvalid(
                f"the prompt has {self._lineage.num_prompt_tokens} tokens and "
                f"{self._request.sampling.max_tokens} more are requested; the model supports "
                f"{self._deps.model.max_model_len} together"
            )
        if not may_hold(self.client.regions, self._deps.region):
            where = f"this conductor {is_in(self._deps.region)}"
            raise OutsideRegions(refused(self.client, "conductor", where))

    async def _place(self) -> Attempt:
        """Start the next attempt. A batch request waits for its turn and for idle capacity."""
        placer = self._placer
        if not self._request.batch or self._life.num_attempts:
            return await self._start(await self._decide())
        queue, fair_share = self._deps.batch_queue, self._deps.fair_share
        client = self._request.client.name
        order_s = self._started_s + fair_share.delay_s(client, self._started_s)
        async with queue.turn(client, placer.priority, order_s, unless=self._aborted):
            while not placer.is_idle_enough(placement := await self._decide()):
                await queue.wait(LOOK_AGAIN_S)
            return await self._start(placement)

    async def _start(self, placement: Placement) -> Attempt:
        placer, booked = self._placer, False
        self._recorder.asks(placement)
        while not booked:
            step = self._life.decided(placement, partial(placer.rejected, placement))
            if isinstance(step, Refuse):
                self._refuse(step)
            if isinstance(step, Look):
                # A part of a request that has begun waits until the others leave room.
                await asyncio.wait((self._aborted,), timeout=step.after_s)
                placement = await self._decide()
                continue
            placement = await self._deps.arbitration.book(placement, placer.num_blocks)
            if self._ending is not None:
                raise self._ending
            booked = placer.knows(placement)
            if not booked:  # a node has left meanwhile
                placement = await self._decide()
        if self._deadline.waits:
            self._deadline.run(self._deps.clock())
            self._set_timer()
        # From here on an abort, or the end of the request, reaches it.
        attempt = self._attempt = placer.start(placement)
        number, placed_s = self._life.num_attempts - 1, self._deps.clock()
        try:
            await asyncio.sleep(0)  # its calls leave now: the nodes need not wait for the book-keeping
        finally:
            placer.note(placement)
            self._recorder.placed(
                placement, number, placed_s, placer.hash_s, placer.place_s, placer.prefix, placer.queued
            )
        return attempt

    async def _decide(self) -> Placement:
        """Place the request, waiting for nodes when there are none: within its deadline, if they start."""
        began_s = self._deps.clock()
        waits_for = ""
        absent: NoNodes | None = None
        while self._ending is None:
            outcome = self._placer.decide()
            if isinstance(outcome, Placement):
                return outcome
            step = self._life.decided(outcome, lambda: None)
            if isinstance(step, Refuse):
                self._refuse(step)
            assert isinstance(step, Look)
            waited_s, prospect = self._deps.clock() - began_s, self._deps.on_demand.ask()
            why = f"{self.client.confinement}; {prospect.why}" if self.client.regions else prospect.why
            absent = NoNodes(outcome.role, waited_s, why, prospect.retry_after_s)
            if waited_s >= min(prospect.wait_s, self._deps.timeout_s):
                if self.client.regions and self._deps.registry.available(outcome.role):
                    refused(self.client, "request", f"{outcome.role} nodes are elsewhere only")
                raise absent
            if waits_for != outcome.role:
                waits_for = outcome.role
                self._recorder.waits(waits_for)
            await self._deps.registry.change(min(step.after_s, prospect.wait_s - waited_s))
        expired = isinstance(self._ending, DeadlineExceeded)
        if absent is not None and self._deps.on_demand.starts_nodes and expired:
            raise absent from self._ending
        raise self._ending

    def _refuse(self, refuse: Refuse) -> NoReturn:
        """Raise the error of a rejection."""
        rejection = refuse.rejection
        if rejection.capacity_tokens:
            raise RequestInvalid(rejection.reason)
        raise RequestRejected(rejection.reason, rejection.retry_after_s, rejection.stage or "nodes")

    # ------------------------------------------------------------------ tokens

    def _on_first_token(self, attempt: Attempt, reply: node_pb2.PrefillReply) -> TokenEvent:
        plan, token, lineage = attempt.plan, reply.token, self._lineage
        if token.finish_reason in (node_pb2.FINISH_ERROR, node_pb2.FINISH_CANCELLED):
            plan.prefill.breaker.erred()
            why, failure = f"node {plan.prefill.node_id}: {token.error}", FailureClass.of_wire(token.failure)
            raise AttemptFailed(failure, "error", why, plan.prefill.node_id)
        due = len(lineage.output_ids)
        if not token.has_token or token.index != due:
            raise _disorder(token, due, plan.prefill.node_id)
        self._recorder.prefilled(plan, lineage.num_tokens, reply)
        if due:
            return self._event(token)
        self._recorder.first_token()
        prompt_logprobs = None
        if self._request.prompt_logprobs:
            prompt_logprobs = tuple(map(TokenLogprobs.from_proto, reply.prompt_logprobs))
        # An engine of another project tells at the end.
        num_cached_tokens = reply.num_cached_tokens if plan.prefill.engine is None else 0
        return self._event(token, num_cached_tokens, prompt_logprobs)

    def _with_cached(self, attempt: Attempt, last: TokenEvent) -> TokenEvent:
        """The last event, with what only an attempt's end tells of its beginning."""
        cached, number = attempt.num_cached_tokens, attempt.plan.prefill_request.work.attempt
        if cached is None or self._request.output_ids or number != self._placer.first_attempt:
            return last  # of what had been streamed by then, too
        self._recorder.cached(cached)
        return replace(last, num_cached_tokens=cached)

    def _on_token(self, attempt: Attempt, token: node_pb2.TokenOut) -> TokenEvent | None:
        """The event of a message of a decode node; None: the message has no new token."""
        if token.HasField("received"):
            self._recorder.transferred(attempt.plan, token.received)
        if token.preempted:
            self._recorder.preempted(attempt.plan)
        due = len(self._lineage.output_ids)
        if token.has_token:
            if token.index == due:
                self._suspicion.clear()
                return self._event(token)
            if token.index > due:
                raise _disorder(token, due, self._recorder.timeline.summary.decode_node)
            # Streamed already, but perhaps without its finish reason.
        if token.finish_reason:
            return TokenEvent(due, -1, finish_reason=_FINISH[token.finish_reason])
        return None

    def _event(
        self,
        token: node_pb2.TokenOut,
        num_cached_tokens: int = 0,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> TokenEvent:
        output_ids = self._lineage.output_ids
        output_ids.append(token.token_id)
        finish_reason = _FINISH.get(token.finish_reason)
        if finish_reason is None and len(output_ids) >= self._limit:
            finish_reason = "length"
        logprobs = TokenLogprobs.from_proto(token.logprobs) if token.HasField("logprobs") else None
        self._recorder.num_accepted += token.accepted
        return TokenEvent(
            token.index,
            token.token_id,
            logprobs,
            finish_reason,
            num_cached_tokens,
            prompt_logprobs,
            token.accepted,
        )

    # ------------------------------------------------------------------ endings

    async def _failed(self, failure: AttemptFailed) -> None:
        """Prepare the next attempt. Raises if this was the last one."""
        num_tokens, attempt = len(self._lineage.output_ids), self._life.num_attempts - 1
        level = logging.INFO if failure.cause == QUEUE else logging.WARNING
        log.log(level, "attempt %d after %d tokens: %s", attempt, num_tokens, failure.reason)
        silent_s = self._attempt.silent_s if self._attempt is not None else 0.0
        self._recorder.retry(failure, attempt, num_tokens, silent_s, self._placer.spent)
        step = self._life.failed(failure.cause, failure.nodes, num_tokens)
        if failure.cause == "ended_life":
            self._suspicion.add(failure.reason)
            if self._suspicion.is_proven:
                raise RequestEndsLives(self._suspicion.ended) from failure
        if isinstance(step, Fail):
            if failure.cause == REFUSED and not num_tokens:
                raise RequestRejected(failure.reason, retry_after_s=1.0) from failure
            raise RequestFailed(failure.reason, step.num_failures, num_tokens, failure.failure) from failure
        if step.after_s:
            await asyncio.sleep(step.after_s)

    def _set_timer(self) -> None:
        """Expire at the deadline as it is now."""
        if self._timer is not None:
            self._timer.cancel()
        left_s = max(self._deadline.ends_s - self._deps.clock(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)
        if not left_s:
            self._expire()  # before anything is computed

    def _expire(self) -> None:
        deadline, num_tokens = self._deadline, len(self._lineage.output_ids)
        self.abort(DeadlineExceeded(deadline.limit_s, num_tokens, waited=deadline.waits))

    def _end(self, finish_reason: str, error: Exception | None = None) -> None:
        """Release all that the request holds. Only the first call has an effect."""
        timer, self._timer = self._timer, None
        if timer is None:
            return
        self._suspicion.clear()
        timer.cancel()
        if not self._admitted:
            return
        num_tokens = len(self._lineage.output_ids)
        num_new = num_tokens - len(self._request.output_ids)
        if self._deps.runs.get(self._request.request_id) is self:
            del self._deps.runs[self._request.request_id]
        if self._attempt is not None:
            self._attempt.close()
        ended_by_client = error is None or isinstance(error, DeadlineExceeded)
        pays = self._life.pays(num_new, ended_by_client=ended_by_client)
        self._placer.settle(pays=pays)
        self._deps.admission.end(self._request, num_new, pays=pays)
        self._deps.batch_queue.notify()
        if error is None and num_new > 0:
            self._send_hint()
        self._recorder.done(finish_reason, num_tokens, self._placer.spent, num_new, error)

    def _send_hint(self) -> None:
        request, attempt, deps = self._request, self._attempt, self._deps
        if request.cache_hint is None or attempt is None:
            return
        chain = deps.registry.chain(request.tenant, request.adapter_key)
        if chain is not None:
            # The last token has no KV.
            num_blocks = (self._lineage.num_tokens - 1) // deps.model.block_size
            keys = self._lineage.hash_blocks(chain)[:num_blocks]
            plan = attempt.plan
            deps.hints.send(request.cache_hint, request.client, keys, plan.prefill, plan.decode)


def _disorder(token: node_pb2.TokenOut, due: int, node_id: str) -> AttemptFailed:
    how = f"node {node_id} sent token {token.index} instead of {due}"
    return AttemptFailed(FailureClass.WORKER, "disorder", how, node_id)
