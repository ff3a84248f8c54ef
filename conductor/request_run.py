"""The life of one request: place, prefill, decode, finish; and place again whenever a node fails it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator

from conductor.attempt import Attempt, AttemptFailed, AttemptPlan, AttemptUseless
from conductor.cluster_view import PlaceRequest, Slo
from conductor.errors import (
    ConductorError,
    DeadlineExceeded,
    NoNodes,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
)
from conductor.lineage import Lineage
from conductor.place import place
from conductor.placement import Placement, Rejection
from conductor.recorder import Recorder
from conductor.request import GenerateRequest, TokenEvent, TokenLogprobs
from conductor.services import Services
from conductor.timeline import RequestTimeline
from protos import node_pb2

log = logging.getLogger(__name__)

# How long a request waits for a node of a role to appear when there is none.
NODE_WAIT_S = 2.0
# A breaker closes without a word, so who waits looks again this often.
_LOOK_AGAIN_S = 0.1
# Nodes that are merely busy get a moment before they are asked again, longer each time.
_REFUSED_PAUSE_S = 0.05
# Our own deadline must be the first to fire: a call that times out looks like a dead node.
_CALL_MARGIN_S = 1.0

_FINISH = {node_pb2.FINISH_STOP: "stop", node_pb2.FINISH_LENGTH: "length"}


class RequestRun:
    """One request, from the first step of ``events`` until it is exhausted or closed.

    Tokens leave in order and exactly once: an event is made only of the token whose index is next, and a new
    attempt starts from the lineage of what has been streamed.
    """

    def __init__(self, request: GenerateRequest, services: Services) -> None:
        self.request_id = request.request_id
        self.started_s = services.clock()
        timeline = RequestTimeline(self.request_id, time.time(), self.started_s)
        self._request = request
        self._services = services
        self._recorder = Recorder(timeline, services.cost_model, services.clock)
        self._lineage = Lineage(request.prompt_token_ids, services.model.block_size)
        room = services.model.max_model_len - self._lineage.num_prompt_tokens
        self._limit = min(request.sampling.max_tokens, room)  # tokens it may produce
        # Drawn here, so that what is sampled does not depend on where or how often it is placed.
        seed = request.sampling.seed
        seed = services.rng.getrandbits(64) if seed is None else seed % 2**64
        self._sampling = request.sampling.to_proto(seed)
        self._timeout_s = services.timeout_s if request.deadline_s is None else request.deadline_s
        self._avoid: set[str] = set()
        self._num_attempts = 0
        self._attempt: Attempt | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._ending: Exception | None = None
        self._hash_s = self._place_s = 0.0  # of the latest placement

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """See ``Conductor.generate``."""
        services = self._services
        services.admission.enter(self)
        services.timelines.put(self._recorder.timeline)
        self._recorder.queued(self._lineage.num_prompt_tokens, self._limit)
        self._deadline = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)
        try:
            self._check()
            while True:
                attempt = self._attempt = await self._place()
                try:
                    event: TokenEvent | None = self._take_first(attempt, await attempt.first())
                    while event is None or event.finish_reason is None:
                        if event is not None:
                            yield event
                        event = self._take(attempt, await attempt.token())
                    # Before the last event goes out: nobody may come back for more.
                    self._end(event.finish_reason)
                    yield event
                    return
                except AttemptFailed as failure:
                    await self._failed(failure)
                except AttemptUseless as useless:
                    raise RequestInvalid(str(useless)) from useless
                finally:
                    attempt.close()
        except Exception as error:
            self._end(type(error).__name__, str(error))
            raise
        finally:
            self._end("cancelled")

    def abort(self, error: Exception) -> None:
        """Whoever waits for the next event gets ``error``."""
        self._ending = error
        if self._attempt is not None:
            self._attempt.abort(error)

    # ------------------------------------------------------------------ placing

    def _check(self) -> None:
        if self._limit < 1:
            raise RequestInvalid(
                f"the prompt has {self._lineage.num_prompt_tokens} tokens and "
                f"{self._request.sampling.max_tokens} more are asked for; the model takes "
                f"{self._services.model.max_model_len} together"
            )

    async def _place(self) -> Attempt:
        """Start the next attempt, waiting a little for nodes when there are none."""
        began_s = self._services.clock()
        waits_for = ""
        while self._ending is None:
            outcome = self._decide()
            if isinstance(outcome, Placement):
                attempt = self._start(outcome)
                self._recorder.placed(outcome, attempt.plan.key[1], self._hash_s, self._place_s)
                return attempt
            if not outcome.role:
                raise self._refusal(outcome)
            waited_s = self._services.clock() - began_s
            if waited_s >= NODE_WAIT_S:
                raise NoNodes(outcome.role, waited_s)
            if waits_for != outcome.role:
                waits_for = outcome.role
                self._recorder.waits(waits_for)
            await self._services.registry.change(min(_LOOK_AGAIN_S, NODE_WAIT_S - waited_s))
        raise self._ending

    def _decide(self) -> Placement | Rejection:
        services, lineage = self._services, self._lineage
        root_key = services.registry.root_key(self._request.tenant)
        if root_key is None:
            return Rejection("no node has come yet", role="prefill")
        began_s = services.clock()
        keys = lineage.hash_blocks(root_key)
        hashed_s = services.clock()
        remaining = self._limit - len(lineage.output_ids)
        # What has begun is brought to its end if that can be done at all.
        begun = self._num_attempts > 0
        request = PlaceRequest(
            num_tokens=lineage.num_tokens,
            remaining_tokens=remaining,
            expected_tokens=services.cost_model.expected_output_tokens(remaining),
            deadline_s=math.inf if begun else self._timeout_s,
            reads_cache=not self._wants_prompt_logprobs,
        )
        view = services.registry.view(keys, self._avoid)
        outcome = place(request, view, Slo() if begun else services.slo, services.policy)
        self._hash_s, self._place_s = hashed_s - began_s, services.clock() - hashed_s
        return outcome

    def _refusal(self, rejection: Rejection) -> ConductorError:
        if rejection.capacity_tokens:
            return RequestInvalid(rejection.reason)
        return RequestRejected(rejection.reason, rejection.retry_after_s)

    def _start(self, placement: Placement) -> Attempt:
        services = self._services
        members, number = services.registry.members, self._num_attempts
        self._num_attempts += 1
        estimate = placement.prefill
        fetches = estimate.fetched_tokens > 0
        left_s = self.started_s + self._timeout_s - services.clock()
        attempt = Attempt(
            AttemptPlan(
                key=(self.request_id, number),
                work=self._work(number),
                placement=placement,
                prefill=members[estimate.node_id],
                decode=members[placement.decode.node_id] if placement.decode else None,
                fetch_from=members[estimate.fetch_from].kv_address if fetches else None,
                num_fetch_blocks=estimate.prefix_tokens // services.model.block_size if fetches else 0,
                prompt_logprobs=self._wants_prompt_logprobs,
                conductor_id=services.conductor_id,
                timeout_s=max(left_s, 0.0) + _CALL_MARGIN_S,
            )
        )
        attempt.start()
        return attempt

    def _work(self, number: int) -> node_pb2.Work:
        lineage = self._lineage
        return node_pb2.Work(
            request_id=self.request_id,
            token_ids=lineage.token_ids().tobytes(),
            num_prompt_tokens=lineage.num_prompt_tokens,
            root_key=lineage.root_key,
            block_keys=lineage.packed_keys(),
            sampling=self._sampling,
            priority=self._request.priority,
            deadline_unix_s=self._recorder.timeline.started_unix_s + self._timeout_s,
            attempt=number,
        )

    @property
    def _wants_prompt_logprobs(self) -> bool:
        return self._request.prompt_logprobs and not self._lineage.output_ids

    # ------------------------------------------------------------------ what comes back

    def _take_first(self, attempt: Attempt, reply: node_pb2.PrefillReply) -> TokenEvent:
        plan, token, lineage = attempt.plan, reply.token, self._lineage
        if token.finish_reason in (node_pb2.FINISH_ERROR, node_pb2.FINISH_CANCELLED):
            plan.prefill.erred()
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

    def _take(self, attempt: Attempt, token: node_pb2.TokenOut) -> TokenEvent | None:
        """The event of what a decode node sent; None when it is news for the timeline only."""
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
        """Get ready to be placed again. Raises when that was the last attempt."""
        num_tokens = len(self._lineage.output_ids)
        number = self._num_attempts - 1
        log.warning("attempt %d after %d tokens: %s", number, num_tokens, failure.reason)
        self._recorder.retry(failure, number, num_tokens)
        self._avoid.update(failure.nodes)
        if self._num_attempts >= self._services.max_attempts:
            if failure.cause == "refused" and not num_tokens:
                raise RequestRejected(failure.reason, retry_after_s=1.0) from failure
            raise RequestFailed(failure.reason, self._num_attempts, num_tokens) from failure
        if failure.cause == "refused":
            await asyncio.sleep(_REFUSED_PAUSE_S * number)

    def _expire(self) -> None:
        self.abort(DeadlineExceeded(self._timeout_s, len(self._lineage.output_ids)))

    def _end(self, finish_reason: str, error: str = "") -> None:
        """Let everything go that this request holds. The first call counts."""
        if self._deadline is None:
            return
        self._deadline.cancel()
        self._deadline = None
        if self._attempt is not None:
            self._attempt.close()
        self._services.admission.leave(self)
        self._recorder.done(finish_reason, len(self._lineage.output_ids), error)


def _disorder(token: node_pb2.TokenOut, due: int, node_id: str) -> AttemptFailed:
    return AttemptFailed("disorder", f"node {node_id} sent token {token.index} where {due} was due", node_id)
