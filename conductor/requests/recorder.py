"""Records the events of one request: timeline, metrics, and observations for the cost model."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from moonpool.conductor.accounts.spent import Spent
from moonpool.conductor.errors import RequestEndsLives, RequestFailed, RequestRejected
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.observing.prefix_outcomes import PrefixOutcome
from moonpool.conductor.observing.timelines.parts import parts_of
from moonpool.conductor.observing.timelines.spans import CONDUCTOR, spans_of
from moonpool.conductor.observing.timelines.timeline import RequestTimeline
from moonpool.conductor.placing.placement import Placement
from moonpool.conductor.request import GenerateRequest
from moonpool.conductor.requests.attempt import AttemptFailed, AttemptPlan
from moonpool.conductor.requests.dependencies import RequestDependencies
from moonpool.conductor.requests.life import QUEUE
from moonpool.conductor.requests.migration import Migrated, MigrationPlan
from moonpool.conductor.requests.recovery import Recovery
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError, failure_of
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import failures, tracing

log = logging.getLogger(__name__)

# Prompt tokens that were not computed, in all and by source: fields of ``PrefillReply`` and the summary.
_CACHED = ("cached", "pool", "host", "ssd", "fetched")


class Recorder:
    """One per request. Each method records the event that it is named after."""

    def __init__(self, request: GenerateRequest, deps: RequestDependencies, started_s: float) -> None:
        """``started_s``: when the request came, by ``deps.clock``."""
        tenant = request.client.name
        self.timeline = RequestTimeline(
            request.request_id, time.time(), started_s, tenant, delivery=request.delivery
        )
        self._summary = self.timeline.summary
        self.num_accepted = 0  # tokens that took no decode step of their own, by speculation
        self._cost_model, self._activity, self._ledger = deps.cost_model, deps.activity, deps.ledger
        self._clock, self._price = deps.clock, deps.price
        self._slo = request.slo(deps.slo)
        self._asked = False
        self._started_s = started_s
        self._first_s = 0.0  # time of the first token from here; 0: none yet
        self._predicted_ttft_s = 0.0
        self._placed_s = 0.0  # of the latest attempt
        # Blocks, before the first token; by path and speed.
        self._moving_s: dict[tuple[str, str], float] = {}
        self._recovery = Recovery()

    def queued(self, prompt_tokens: int, max_tokens: int) -> None:
        self._summary.prompt_tokens = prompt_tokens
        self.timeline.add("queued", self._started_s, prompt_tokens=prompt_tokens, max_tokens=max_tokens)

    def asks(self, placement: Placement) -> None:
        """Nodes were chosen; the request may still be rejected. Only the first call counts."""
        if not self._asked:
            self._asked = True
            estimate = placement.prefill
            self._activity.demand.arrived(
                estimate.compute_s, self._summary.prompt_tokens, estimate.prefix_tokens
            )

    def placed(
        self,
        placement: Placement,
        attempt: int,
        now_s: float,
        hash_s: float,
        place_s: float,
        prefix: PrefixOutcome,
        queued: dict[str, Any],
    ) -> None:
        """``hash_s``: spent on block keys; ``place_s``: on look-up and placement. ``prefix``: what came of it
        at the first placement. ``queued``: before it, see ``LoadLedger.queued``. ``now_s``: when that was.
        """
        self._placed_s = now_s
        self._recovery.placed(now_s)
        summary = self._summary
        summary.attempts = attempt + 1
        summary.prefill_node = placement.prefill.node_id
        summary.decode_node = placement.decode.node_id if placement.decode else ""
        summary.reason, summary.detail = placement.reason.value, placement.detail
        summary.path = placement.path.value
        summary.prefix_outcome, summary.prefix_missed = prefix.outcome, prefix.missed
        if not self._first_s:
            self._predicted_ttft_s = now_s - self._started_s + placement.prefill.ttft_s
        self.timeline.add(
            "placed",
            now_s,
            attempt=attempt,
            hash_s=hash_s,
            place_s=place_s,
            placement=placement,
            queued=queued,
        )
        log.debug(
            "placed on %s, then %s: %s: %s",
            *(summary.prefill_node, summary.decode_node or "no node", summary.reason, summary.detail),
        )
        core_metrics.placements.labels(placement.reason.value).inc()
        core_metrics.placement_paths.labels(placement.path.value).inc()
        self._activity.placements[placement.reason.value] += 1
        self._activity.paths_taken[placement.path.value] += 1

    def prefilled(self, plan: AttemptPlan, num_tokens: int, reply: node_pb2.PrefillReply) -> None:
        """``num_tokens``: of the prompt, cached ones included."""
        now_s, node_id, placed = self._clock(), plan.prefill.node_id, plan.placement.prefill
        self._first_s = self._first_s or now_s
        computed_tokens = num_tokens - reply.num_cached_tokens
        cached = {f"{source}_tokens": getattr(reply, f"num_{source}_tokens") for source in _CACHED}
        for name, count in cached.items():
            setattr(self._summary, name, count)
        if reply.num_cached_tokens or reply.fetch_error or reply.num_stale_blocks:
            self.timeline.add(
                "prefix_loaded",
                # By the node's own durations it may have begun before it was asked.
                max(now_s - reply.compute_s - reply.queued_s, self._placed_s),
                node=node_id,
                **cached,
                load_s=reply.load_s,
                disk_s=reply.disk_s,
                fetched_nbytes=reply.fetched_nbytes,
                fetch_s=reply.fetch_s,
                fetch_from=placed.fetch_from,
                fetch_error=reply.fetch_error,
                stale_blocks=reply.num_stale_blocks,
                stale_s=reply.stale_s,
            )
        self.timeline.add(
            "prefilled",
            now_s,
            node=node_id,
            queued_s=reply.queued_s,
            compute_s=reply.compute_s,
            predicted_compute_s=placed.compute_s,
            computed_tokens=computed_tokens,
            chunks=self._stretches(reply.chunks, now_s),
        )
        # An engine of another project tells only at the end what it had.
        num_cached = reply.num_cached_tokens if plan.prefill.engine is None else num_tokens
        if recovered := self._recovery.token(num_tokens, num_cached, now_s):
            self.timeline.add("recovered", now_s, node=node_id, **recovered)
        plan.prefill.reuse.add(reply.num_cached_tokens - reply.num_fetched_tokens, now_s)
        sources = {source: cached[f"{source}_tokens"] for source in _CACHED if source != "cached"}
        self._activity.prompt(self.timeline.tenant, {"computed": computed_tokens} | sources)
        if reply.fetch_error:
            self._activity.not_moved(placed.fetch_from, node_id)
        fetched = "fetched", core_metrics.speed_class(reply.fetched_nbytes, reply.fetch_s)
        self._moving_s = {fetched: reply.fetch_s, ("loaded", ""): reply.load_s}
        if plan.prefill.engine is None and plan.prefill.load.prefilled_alone(plan.key):
            self._cost_model.observe_prefill(
                plan.prefill.view.cost,
                uncached_tokens=computed_tokens,
                cached_tokens=reply.num_cached_tokens,
                actual_s=reply.compute_s,
                now_s=now_s,
            )
        self._moved(
            placed.fetch_from, node_id, "", reply.fetched_nbytes, reply.fetch_s, now_s, placed.transfer_s
        )

    def cached(self, num_tokens: int) -> None:
        """The engine says at the end how many tokens of the prompt it had; until now it was a prediction."""
        predicted, self._summary.cached_tokens = self._summary.cached_tokens, num_tokens
        self.timeline.add("cached", self._clock(), cached_tokens=num_tokens, predicted_tokens=predicted)

    def first_token(self) -> None:
        now_s = self._first_s = self._clock()
        self._summary.ttft_s = now_s - self._started_s
        self._activity.demand.first_token(self._summary.ttft_s <= self._slo.ttft_s)
        self.timeline.add(
            "first_token", now_s, ttft_s=self._summary.ttft_s, predicted_ttft_s=self._predicted_ttft_s
        )
        self._cost_model.observe_ttft(self._predicted_ttft_s, self._summary.ttft_s)
        for labels, seconds in self._moving_s.items():
            if seconds:
                share = min(seconds / max(self._summary.ttft_s, seconds), 1.0)
                core_metrics.first_token_moves.labels(*labels).observe(share)

    def transferred(self, plan: AttemptPlan, received: node_pb2.KvReceived) -> None:
        summary = self._summary
        summary.transferred_nbytes = received.nbytes
        summary.transfer_s = received.seconds
        summary.transport = received.transport
        node_id = plan.decode.node_id if plan.decode else ""
        now_s = self._clock()
        self.timeline.add(
            "transferred",
            now_s,
            node=node_id,
            nbytes=received.nbytes,
            transfer_s=received.seconds,
            num_blocks=received.num_blocks,
            num_local_blocks=received.num_local_blocks,
            transport=received.transport,
            reads=self._stretches(received.reads, now_s),
        )
        if plan.decode is not None:
            plan.decode.reuse.add(received.num_local_blocks, now_s)
        source = plan.prefill.node_id
        self._moved(source, node_id, received.transport, received.nbytes, received.seconds, now_s)

    def _moved(
        self,
        source: str,
        target: str,
        transport: str,
        nbytes: int,
        seconds: float,
        now_s: float,
        predicted_s: float | None = None,
    ) -> None:
        if nbytes:
            self._activity.moved(source, target, transport, nbytes, seconds)
            self._cost_model.observe_transfer(
                source, target, nbytes=nbytes, actual_s=seconds, now_s=now_s, predicted_s=predicted_s
            )

    def _stretches(self, stretches: Iterable[node_pb2.Stretch], now_s: float) -> list[dict[str, float]]:
        """The working times of a node, relative to the start of this timeline."""
        end_s = now_s - self._started_s
        return [
            {
                "at_s": end_s - one.ago_s,
                "seconds": one.seconds,
                "tokens": one.num_tokens,
                "nbytes": one.nbytes,
            }
            for one in stretches
        ]

    def preempted(self, plan: AttemptPlan) -> None:
        node_id = plan.decode.node_id if plan.decode else ""
        self.timeline.add("preempted", self._clock(), node=node_id, **plan.spent.take_slowed())

    def migrated(self, moved: Migrated, num_attempts: int, spent: Spent) -> None:
        now_s, received = self._clock(), moved.received
        num_stages = len(received.reads)
        self._summary.decode_node, self._summary.attempts = moved.target, num_attempts
        self.timeline.add(
            "migrated",
            now_s,
            node=moved.target,
            source=moved.source,
            cause=moved.cause,
            first_index=moved.first_index,
            stages=num_stages,
            num_blocks=received.num_blocks,
            num_last_blocks=received.num_last_blocks,
            num_local_blocks=received.num_local_blocks,
            nbytes=received.nbytes,
            transfer_s=received.seconds,
            stopped_s=received.stopped_s,
            downtime_s=moved.downtime_s,
            transport=received.transport,
            reads=self._stretches(received.reads, now_s),
            **spent.take_slowed(),
        )
        core_metrics.migrations.labels(moved.cause, "moved").inc()
        core_metrics.migration_downtime_s.observe(moved.downtime_s)
        core_metrics.migration_stages.observe(num_stages)
        for kind, count in (
            ("running", received.num_blocks - received.num_last_blocks),
            ("stopped", received.num_last_blocks),
            ("local", received.num_local_blocks),
        ):
            core_metrics.migrated_blocks.labels(kind).inc(count)
        self._moved(moved.source, moved.target, received.transport, received.nbytes, received.seconds, now_s)
        gap_ms = 1e3 * moved.downtime_s
        self._activity.event(
            "migrated",
            moved.source,
            f"{self.timeline.request_id} to {moved.target} ({moved.cause}): {received.num_blocks} blocks "
            f"read, {gap_ms:.1f} ms between two tokens",
        )

    def stayed(self, plan: MigrationPlan, reason: str) -> None:
        target = plan.target.node_id
        self.timeline.add("stayed", self._clock(), target=target, cause=plan.cause, reason=reason)
        self._summary.attempts = max(self._summary.attempts, plan.key[1] - self.timeline.first_attempt + 1)
        core_metrics.migrations.labels(plan.cause, "stayed").inc()
        self._activity.event("stayed", target, f"{self.timeline.request_id} did not move there: {reason}")

    def retry(
        self, failure: AttemptFailed, attempt: int, num_tokens: int, silent_s: float, spent: Spent
    ) -> None:
        """``num_tokens``: streamed so far. ``silent_s``: from the attempt's last message to its failure."""
        now_s = self._clock()
        if failure.cause != QUEUE:
            self._recovery.failed(
                failure.failure,
                failure.cause,
                now_s=now_s,
                silent_s=silent_s,
                num_tokens=self._summary.prompt_tokens + num_tokens,
            )
        self.timeline.add(
            "retry",
            now_s,
            attempt=attempt,
            **{"class": failure.failure.value},
            cause=failure.cause,
            silent_s=silent_s,
            reason=failure.reason,
            nodes=list(failure.nodes),
            streamed_tokens=num_tokens,
            **spent.take_slowed(),
        )
        core_metrics.replacements.labels(failure.cause).inc()
        self._activity.event(
            "retry", ", ".join(failure.nodes), f"{self.timeline.request_id}: {failure.reason}"
        )

    def waits(self, role: str) -> None:
        self.timeline.add("waits_for_node", self._clock(), role=role)
        core_metrics.waits.labels(role).inc()

    def failed(self, error: Exception) -> None:
        """The request ends in an error. Its attempts were counted one by one."""
        if not isinstance(error, MoonpoolError):
            failures.count(FailureClass.CONDUCTOR, "error")  # a defect
        elif not isinstance(error, RequestFailed | RequestEndsLives):
            failures.count_error(error)
        if isinstance(error, RequestRejected):
            self._rejected(error)

    def _rejected(self, error: RequestRejected) -> None:
        core_metrics.rejections.labels(error.stage).inc()
        if error.stage in ("arrival", "decode"):
            self._activity.demand.rejected()
        self._activity.rejections[error.stage] += 1

    def done(
        self, finish_reason: str, num_tokens: int, spent: Spent, num_new: int, error: Exception | None = None
    ) -> None:
        """``finish_reason``: stop, length, cancelled, or the error's name. ``num_new``: tokens of its output
        that are from here: the others were another conductor's."""
        now_s = self._clock()
        self._recovery.ended()
        summary = self._summary
        summary.finish_reason = finish_reason
        summary.output_tokens = num_tokens
        summary.e2e_s = now_s - self._started_s
        if num_new > 1:
            summary.tpot_s = (now_s - self._first_s) / (num_new - 1)
        facts: dict[str, Any] = {**spent.take_slowed()}
        if error is not None:
            facts |= {"error": str(error), "class": failure_of(error).value}
        if self.num_accepted and num_new > 1:
            # The first token comes from the prefill.
            summary.tokens_per_step = (num_new - 1) / (num_new - 1 - self.num_accepted)
            facts |= {"accepted_tokens": self.num_accepted, "tokens_per_step": summary.tokens_per_step}
        if not num_new:
            spent.ended_unanswered("abandoned" if finish_reason == "cancelled" else "rejected")
        if spent.total_s:
            summary.node_s, summary.wasted_s = spent.total_s, spent.wasted_s.total()
            summary.cost = self._price * spent.total_s
            facts |= {"node_s": spent.uses(), "cost": summary.cost}
        self._ledger.add(self.timeline.tenant, spent, summary.prompt_tokens, num_new)
        self.timeline.add("done", now_s, finish_reason=finish_reason, output_tokens=num_tokens, **facts)
        for part in parts_of(self.timeline.times()):
            core_metrics.seconds_of(part.name).inc(part.seconds)
        log.debug("%s after %d tokens and %.4f s %s", finish_reason, num_tokens, summary.e2e_s, error or "")
        if finish_reason in ("stop", "length"):
            self._cost_model.output_lengths.observe(summary.prompt_tokens, num_tokens)
            self._activity.demand.ended(num_tokens, summary.tpot_s <= self._slo.tbt_s)
        if tracing.sampled():
            self._export(now_s)

    def _export(self, now_s: float) -> None:
        """Export spans of the conductor itself; nodes export their own."""
        age_s = now_s - self._started_s
        for one in spans_of(self.timeline.to_dict()):
            if one.process == CONDUCTOR:
                facts: dict[str, Any] = {
                    name: value for name, value in one.facts.items() if isinstance(value, str | int | float)
                }
                tracing.record_span(one.name, ago_s=age_s - one.began_s, seconds=one.seconds, **facts)
