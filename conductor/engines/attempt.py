"""One attempt of a request on a vLLM engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

from moonpool.conductor.costs.learned import LearnedCost
from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.engines.completion import Delta, body_of
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.requests.attempt import Attempt, AttemptPlan
from moonpool.protos import node_pb2
from moonpool.runtime.errors import RemoteError

# Steps measured together: chunks of a stream come in bursts.
_WINDOW = 16


class EngineAttempt(Attempt):
    """The tokens come as the stream of one completion. Ending the attempt closes the stream, which makes vLLM
    stop its work. How many tokens of the prompt were cached is known only at the end of the stream.
    """

    def __init__(
        self, plan: AttemptPlan, cost_model: CostModel, clock: Callable[[], float], salt: str
    ) -> None:
        """``salt``: of the tenant; empty: none."""
        super().__init__(plan)
        self._cost_model = cost_model
        self._clock = clock
        self._salt = salt
        token_ids = plan.prefill_request.work.token_ids
        self._num_tokens = len(token_ids) // 4
        self._next = self._num_tokens - plan.prefill_request.work.num_prompt_tokens
        self._is_alone = False  # its prefill shared no step with another prefill of ours
        self._first_s = 0.0  # seconds until the first token
        self._window: tuple[float, int] | None = None  # begin, tokens since

    @property
    def stays(self) -> str:
        return "an engine of another project hands nothing over"

    def _work(self) -> list[Coroutine[Any, Any, None]]:
        assert self.plan.decode in (None, self.plan.prefill), "engines hand nothing over"
        return [self._serve()]

    async def _serve(self) -> None:
        """The whole request on one engine."""
        member, began_s = self.plan.prefill, self._clock()
        member.client.attach(self.plan.key, self)  # so that its end is seen, though the stream may hang
        last: node_pb2.TokenOut | None = None
        async with aclosing(member.engine_client.tokens(self._body(member), self.plan.timeout_s)) as deltas:
            async for delta in deltas:
                if delta.num_cached_tokens is not None:
                    self.num_cached_tokens = delta.num_cached_tokens
                for token in self._tokens_of(delta):
                    if not self._first_s:
                        self._first_s = self._clock() - began_s
                        self._begin_batch(member)
                    if token.finish_reason:
                        last = token  # delivered with what the end of the stream says
                    else:
                        self._deliver(token)
        if last is None or not self._first_s:
            raise RemoteError(member.node_id, "Failed", "INTERNAL", "its stream ended without a last token")
        self._learn_prefill(member)
        if self._reply is None:
            member.breaker.succeeded()
        self._deliver(last)

    def _body(self, member: Member) -> dict[str, Any]:
        engine = member.engine
        assert engine is not None
        return body_of(
            self.plan.prefill_request.work,
            model=member.engine_client.model,
            max_model_len=engine.max_model_len,
            salt=self._salt,
        )

    def _tokens_of(self, delta: Delta) -> Iterator[node_pb2.TokenOut]:
        key, count = self.plan.key, len(delta.token_ids)
        for i, token_id in enumerate(delta.token_ids):
            yield node_pb2.TokenOut(
                request_id=key[0],
                attempt=key[1],
                index=self._next,
                token_id=token_id,
                has_token=True,
                finish_reason=delta.finish if i == count - 1 else node_pb2.FINISH_NONE,
                logprobs=delta.logprobs[i] if delta.logprobs else None,
            )
            self._next += 1
        if not count and delta.finish:
            yield node_pb2.TokenOut(request_id=key[0], attempt=key[1], finish_reason=delta.finish)

    def _begin_batch(self, member: Member) -> None:
        """The first token is here: the request is in the engine's batch."""
        self._is_alone = member.load.prefilled_alone(self.plan.key)
        member.load.end_prefill(self.plan.key)
        member.load.decoding(self.plan.key)
        self.kv_received = True

    def _deliver(self, token: node_pb2.TokenOut) -> None:
        member = self.plan.prefill
        if self._reply is None:
            placed = self.plan.placement.prefill
            # What the index promised, until the engine says.
            cached = placed.prefix_tokens if self.num_cached_tokens is None else self.num_cached_tokens
            self._reply = node_pb2.PrefillReply(
                token=token,
                num_cached_tokens=cached,
                num_host_tokens=min(placed.local_tokens, cached),
                num_fetched_tokens=max(cached - placed.local_tokens, 0),
                compute_s=self._first_s,
            )
            self._news.set()
            return
        self.put(token)
        member.delivered()
        self._measure_steps(member)

    # ------------------------------------------------------------------ learning

    def _learn_prefill(self, member: Member) -> None:
        cost = member.view.cost
        if not self._is_alone or self.num_cached_tokens is None or not isinstance(cost, LearnedCost):
            return
        cached = min(self.num_cached_tokens, self._num_tokens - 1)
        if cost.knows_prefills:
            predicted_s = cost.profile.prefill_s(self._num_tokens - cached, cached)
            self._cost_model.check("prefill", predicted_s, self._first_s)
            member.breaker.took(predicted_s, self._first_s)
        cost.learn_prefill(self._num_tokens - cached, cached, self._first_s)

    def _measure_steps(self, member: Member) -> None:
        """Learn from several steps in a row during which no prompt of ours was computed on the engine."""
        cost, view, now_s = member.view.cost, member.view, self._clock()
        if len(view.queue) or not isinstance(cost, LearnedCost):
            self._window = None
            return
        if self._window is None:
            self._window = now_s, 0
            return
        since_s, count = self._window[0], self._window[1] + 1
        if count < _WINDOW:
            self._window = since_s, count
            return
        step_s = (now_s - since_s) / count
        if cost.knows_steps:
            predicted_s = cost.profile.step_s(view.num_running, view.num_context_tokens)
            self._cost_model.check("step", predicted_s, step_s)
            member.breaker.took(predicted_s * count, step_s * count)
        cost.learn_step(view.num_running, view.num_context_tokens, step_s)
        self._window = now_s, 0
