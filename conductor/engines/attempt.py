"""One attempt of a request on a vLLM engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from moonpool.conductor.costs.learned import LearnedCost
from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.engines.completion import Delta, body_of, prefill_body_of
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.request import CacheHint
from moonpool.conductor.requests.attempt import Attempt, AttemptPlan
from moonpool.protos import node_pb2
from moonpool.runtime.errors import RemoteError

# Steps measured together: chunks of a stream come in bursts.
_WINDOW = 16
# A hand-over takes this long at least, whatever a step was predicted to take.
_LEAST_S = 1e-4


class EngineAttempt(Attempt):
    """The tokens come as the stream of one completion. Ending the attempt closes the stream, which makes vLLM
    stop its work. How many tokens of the prompt were cached is known only at the end of the stream.

    On two engines the first one computes the prompt in a call of its own, and the stream is that of the
    second, which reads the prompt's blocks from the first, or computes what it does not get. All tokens are
    the second engine's, so the first one is not needed any more once it has answered.
    """

    def __init__(
        self,
        plan: AttemptPlan,
        cost_model: CostModel,
        clock: Callable[[], float],
        salt: str,
        hint: CacheHint | None,
    ) -> None:
        """``salt``: of the tenant; empty: none."""
        super().__init__(plan)
        self._cost_model = cost_model
        self._clock = clock
        self._salt = salt
        self._hint = hint
        token_ids = plan.prefill_request.work.token_ids
        self._num_tokens = len(token_ids) // 4
        self._next = self._num_tokens - plan.prefill_request.work.num_prompt_tokens
        self._is_alone = False  # its prefill shared no step with another prefill of ours
        self._first_s = 0.0  # seconds that the prompt took
        self._window: tuple[float, int] | None = None  # begin, tokens since

    @property
    def stays(self) -> str:
        return "an engine of another project hands no running request over"

    def _work(self) -> list[Coroutine[Any, Any, None]]:
        return [self._serve()]

    @property
    def _decoder(self) -> Member:
        """The engine that the tokens come from."""
        return self.plan.decode or self.plan.prefill

    async def _serve(self) -> None:
        """The whole request."""
        plan, decoder = self.plan, self._decoder
        given = {} if decoder is plan.prefill else await self._compute(plan.prefill)
        # So that its end is seen, though the stream may hang.
        decoder.client.attach(plan.key, self)
        began_s = self._clock()
        took_s, last = 0.0, None
        body = self._body(decoder, given)
        async with aclosing(decoder.engine_client.tokens(body, plan.timeout_s)) as deltas:
            async for delta in deltas:
                # An engine that took the prompt over had all of it; the other one has told.
                if delta.num_cached_tokens is not None and decoder is plan.prefill:
                    self.num_cached_tokens = delta.num_cached_tokens
                for token in self._tokens_of(delta):
                    if not self.kv_received:
                        took_s = self._clock() - began_s
                        self._begin_batch(decoder, took_s)
                    if token.finish_reason:
                        last = token  # delivered with what the end of the stream says
                    else:
                        self._deliver(token)
                if given and self._reply is not None:
                    self.put(self._received(decoder, took_s))
                    given = {}
        if last is None or not self.kv_received:
            raise RemoteError(decoder.node_id, "Failed", "INTERNAL", "its stream ended without a last token")
        if decoder is plan.prefill:
            self._learn_prefill(decoder)
        if self._reply is None:
            decoder.breaker.succeeded()
        self._deliver(last)

    async def _compute(self, member: Member) -> dict[str, Any]:
        """Have an engine compute the prompt; returns how it hands it over."""
        plan, began_s = self.plan, self._clock()
        work = plan.prefill_request.work
        model = member.engine_client.model
        body = prefill_body_of(work, model=model, salt=self._salt, hint=self._hint)
        prefilled = await member.engine_client.compute(body, plan.timeout_s)
        self._first_s = self._clock() - began_s
        self.num_cached_tokens = prefilled.num_cached_tokens
        self._is_alone = member.load.prefilled_alone(plan.key)
        member.load.end_prefill(plan.key)
        member.client.detach(plan.key)
        member.breaker.succeeded()
        self._learn_prefill(member)
        return prefilled.params

    def _body(self, member: Member, given: Mapping[str, Any]) -> dict[str, Any]:
        engine, work = member.engine, self.plan.prefill_request.work
        assert engine is not None
        if self._next and work.sampling.HasField("structure"):
            raise RemoteError(
                member.node_id, "Failed", "UNIMPLEMENTED", "vLLM cannot go on in the middle of a structure"
            )
        return body_of(
            work,
            model=member.engine_client.model,
            max_model_len=engine.max_model_len,
            salt=self._salt,
            given=given,
            hint=self._hint,
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

    def _begin_batch(self, member: Member, since_s: float) -> None:
        """The first token is here, ``since_s`` after it was asked for: the request is in the engine's
        batch."""
        if member is self.plan.prefill:
            self._first_s = since_s
            self._is_alone = member.load.prefilled_alone(self.plan.key)
            member.load.end_prefill(self.plan.key)
        member.load.decoding(self.plan.key)
        self.kv_received = True

    def _received(self, member: Member, took_s: float) -> node_pb2.TokenOut:
        """The hand-over; its first token took ``took_s``. Engines do not report the reading alone, so the
        predicted step is subtracted."""
        plan, estimate = self.plan, self.plan.placement.decode
        assert member.engine is not None and estimate is not None
        block_size = member.engine.block_size
        num_blocks = -(-(self._num_tokens - 1) // block_size)
        num_local = min(estimate.local_tokens // block_size, num_blocks)
        received = node_pb2.KvReceived(
            nbytes=(num_blocks - num_local) * member.engine.block_nbytes,
            seconds=max(took_s - estimate.step_s, _LEAST_S),
            num_blocks=num_blocks - num_local,
            num_local_blocks=num_local,
            transport="connector",
        )
        return node_pb2.TokenOut(request_id=plan.key[0], attempt=plan.key[1], received=received)

    def _deliver(self, token: node_pb2.TokenOut) -> None:
        member = self._decoder
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
        cost.learn_prefill(self._num_tokens - cached, cached, self._first_s, self._clock())

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
        cost.learn_step(view.num_running, view.num_context_tokens, step_s, now_s)
        self._window = now_s, 0
