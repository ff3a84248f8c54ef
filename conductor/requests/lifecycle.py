"""The lifecycle of one request: place, prefill, decode, finish; placed again when a node fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from moonpool.conductor.errors import (
    DeadlineExceeded,
    NoNodes,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
)
from moonpool.conductor.observing.timeline import RequestTimeline
from moonpool.conductor.placing.placement import Placement, Rejection
from moonpool.conductor.request import GenerateRequest, TokenEvent, TokenLogprobs
from moonpool.conductor.requests.attempt import Attempt, AttemptFailed, AttemptInvalid
from moonpool.conductor.requests.dependencies import RequestDependencies
from moonpool.conductor.requests.lineage import Lineage
from moonpool.conductor.requests.placer import RequestPlacer
from moonpool.conductor.requests.recorder import Recorder
from moonpool.protos import node_pb2

log = logging.getLogger(__name__)

# How long a request waits for a node of a role to appear when there is none.
NODE_WAIT_S = 2.0
# A circuit breaker closes by time, so waiting requests check this often.
_LOOK_AGAIN_S = 0.1
# The pause before busy nodes are asked again; it grows with each attempt.
_REFUSED_PAUSE_S = 0.05

_FINISH = {node_pb2.FINISH_STOP: "stop", node_pb2.FINISH_LENGTH: "length"}


class RequestRun:
    """One request, from the first step of ``events`` until it is exhausted or closed.

    Tokens are streamed in order and exactly once: only the token with the next index becomes an event, and a
    new attempt starts from the lineage of streamed tokens.
    """

    def __init__(self, request: GenerateRequest, deps: RequestDependencies) -> None:
        self._request = request
        self._started_s = deps.clock()
        timeline = RequestTimeline(request.request_id, time.time(), self._started_s)
        self._deps = deps
        self._recorder = Recorder(timeline, deps.cost_model, deps.activity, deps.clock, request.client.name)
        self._lineage = Lineage(request.prompt_token_ids, deps.model.block_size)
        room = deps.model.max_model_len - self._lineage.num_prompt_tokens
        self._limit = min(request.sampling.max_tokens, room)  # tokens it may produce
        self._timeout_s = deps.timeout_s if request.deadline_s is None else request.deadline_s
        self._placer = RequestPlacer(
            request,
            deps,
            self._lineage,
            limit=self._limit,
            timeout_s=self._timeout_s,
            started_s=self._started_s,
            started_unix_s=timeline.started_unix_s,
        )
        self._attempt: Attempt | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._ending: Exception | None = None
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """See ``Conductor.generate``."""
        deps = self._deps
        try:
            deps.admission.enter(self._request, self.abort)
        except RequestRejected as error:
            self._recorder.rejected(error)
            raise
        # A client may reuse an id when it retries. Attempt numbers continue, so that late messages about the
        # former request are not mistaken for this one.
        former, timeline = deps.timelines.get(self._request.request_id), self._recorder.timeline
        if former is not None:
            timeline.first_attempt = former.first_attempt + former.summary.attempts
        self._placer.first_attempt = timeline.first_attempt
        deps.timelines.put(timeline)
        self._recorder.queued(self._lineage.num_prompt_tokens, self._limit)
        self._deadline = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)
        try:
            self._check()
            while True:
                attempt = self._attempt = await self._place()
                try:
                    reply = await attempt.first()
                    deps.batch_queue.notify()
                    if not self._lineage.output_ids:
                        self._refuse(self._placer.rejected_before_decode(attempt))
                    event: TokenEvent | None = self._on_first_token(attempt, reply)
                    while event is None or event.finish_reason is None:
                        if event is not None:
                            yield event
                        event = self._on_token(attempt, await attempt.token())
                    # Before the last event: the consumer may not ask again.
                    self._end(event.finish_reason)
                    yield event
                    return
                except AttemptFailed as failure:
                    await self._failed(failure)
                except AttemptInvalid as useless:
                    raise RequestInvalid(str(useless)) from useless
                finally:
                    attempt.close()
        except Exception as error:
            if isinstance(error, RequestRejected):
                self._recorder.rejected(error)
            self._end(type(error).__name__, str(error))
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

    # ------------------------------------------------------------------ placing

    def _check(self) -> None:
        if self._limit < 1:
            raise RequestInvalid(
                f"the prompt has {self._lineage.num_prompt_tokens} tokens and "
                f"{self._request.sampling.max_tokens} more are requested; the model supports "
                f"{self._deps.model.max_model_len} together"
            )

    async def _place(self) -> Attempt:
        """Start the next attempt. A batch request waits for its turn and for idle capacity."""
        placer = self._placer
        begun = placer.num_attempts > 0
        if not self._request.batch or begun:
            return await self._start(await self._decide(), begun=begun)
        queue, fair_share = self._deps.batch_queue, self._deps.fair_share
        client = self._request.client.name
        order_s = self._started_s + fair_share.delay_s(client, self._started_s)
        async with queue.turn(client, placer.priority, order_s, unless=self._aborted):
            while not placer.is_idle_enough(placement := await self._decide()):
                await queue.wait(_LOOK_AGAIN_S)
            return await self._start(placement, begun=False)

    async def _start(self, placement: Placement, *, begun: bool) -> Attempt:
        placer = self._placer
        if not begun:
            self._refuse(placer.rejected(placement))
        placement = await self._deps.arbitration.book(placement, placer.num_blocks)
        if self._ending is not None:
            raise self._ending
        attempt = placer.start(placement)
        self._recorder.placed(placement, placer.num_attempts - 1, placer.hash_s, placer.place_s)
        return attempt

    async def _decide(self) -> Placement:
        """Place the request, waiting ``NODE_WAIT_S`` for nodes when there are none."""
        began_s = self._deps.clock()
        waits_for = ""
        while self._ending is None:
            outcome = self._placer.decide()
            if isinstance(outcome, Placement):
                return outcome
            if not outcome.role:
                self._refuse(outcome)
            waited_s = self._deps.clock() - began_s
            if waited_s >= NODE_WAIT_S:
                raise NoNodes(outcome.role, waited_s)
            if waits_for != outcome.role:
                waits_for = outcome.role
                self._recorder.waits(waits_for)
            await self._deps.registry.change(min(_LOOK_AGAIN_S, NODE_WAIT_S - waited_s))
        raise self._ending

    def _refuse(self, rejection: Rejection | None) -> None:
        """Raise the error of a rejection; None: return."""
        if rejection is None:
            return
        if rejection.capacity_tokens:
            raise RequestInvalid(rejection.reason)
        raise RequestRejected(rejection.reason, rejection.retry_after_s, rejection.stage or "nodes")

    # ------------------------------------------------------------------ tokens

    def _on_first_token(self, attempt: Attempt, reply: node_pb2.PrefillReply) -> TokenEvent:
        plan, token, lineage = attempt.plan, reply.token, self._lineage
        if token.finish_reason in (node_pb2.FINISH_ERROR, node_pb2.FINISH_CANCELLED):
            plan.prefill.breaker.erred()
            raise AttemptFailed("error", f"node {plan.prefill.node_id}: {token.error}", plan.prefill.node_id)
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
        return self._event(token, reply.num_cached_tokens, prompt_logprobs)

    def _on_token(self, attempt: Attempt, token: node_pb2.TokenOut) -> TokenEvent | None:
        """The event of a message of a decode node; None: the message has no new token."""
        if token.HasField("received"):
            self._recorder.transferred(attempt.plan, token.received)
        if token.preempted:
            self._recorder.preempted(attempt.plan)
        due = len(self._lineage.output_ids)
        if token.has_token:
            if token.index == due:
                return self._event(token)
            if token.index > due:
                raise _disorder(token, due, self._recorder.timeline.summary.decode_node)
            return None  # streamed already
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
        return TokenEvent(
            token.index, token.token_id, logprobs, finish_reason, num_cached_tokens, prompt_logprobs
        )

    # ------------------------------------------------------------------ endings

    async def _failed(self, failure: AttemptFailed) -> None:
        """Prepare the next attempt. Raises if this was the last one."""
        num_tokens, num_attempts = len(self._lineage.output_ids), self._placer.num_attempts
        log.warning("attempt %d after %d tokens: %s", num_attempts - 1, num_tokens, failure.reason)
        self._recorder.retry(failure, num_attempts - 1, num_tokens)
        self._placer.avoid.update(failure.nodes)
        if num_attempts >= self._deps.max_attempts:
            if failure.cause == "refused" and not num_tokens:
                raise RequestRejected(failure.reason, retry_after_s=1.0) from failure
            raise RequestFailed(failure.reason, num_attempts, num_tokens) from failure
        if failure.cause == "refused":
            await asyncio.sleep(_REFUSED_PAUSE_S * (num_attempts - 1))

    def _expire(self) -> None:
        self.abort(DeadlineExceeded(self._timeout_s, len(self._lineage.output_ids)))

    def _end(self, finish_reason: str, error: str = "") -> None:
        """Release all that the request holds. Only the first call has an effect."""
        if self._deadline is None:
            return
        self._deadline.cancel()
        self._deadline = None
        if self._attempt is not None:
            self._attempt.close()
        self._deps.admission.leave(self._request, len(self._lineage.output_ids))
        self._deps.batch_queue.notify()
        self._recorder.done(finish_reason, len(self._lineage.output_ids), error)


def _disorder(token: node_pb2.TokenOut, due: int, node_id: str) -> AttemptFailed:
    return AttemptFailed("disorder", f"node {node_id} sent token {token.index} instead of {due}", node_id)
