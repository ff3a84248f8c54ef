"""Conversion between protobuf messages and the engine's sequences and events."""

from __future__ import annotations

import math
import time

import numpy as np

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence, Spent, TokenLogprobs
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.kvstore.blocks import keys as block_keys
from moonpool.protos import node_pb2
from moonpool.runtime.failures import FailureClass


def sequence_of(work: node_pb2.Work, *, arrived_s: float, prompt_logprobs: bool = False) -> Sequence:
    """Return the sequence of a request. Raises ``KeyFormatError`` for keys of a wrong length."""
    return Sequence(
        work.request_id,
        work.attempt,
        np.frombuffer(work.token_ids, "<i4"),
        work.num_prompt_tokens,
        sampling=Sampling.from_proto(work.sampling),
        root_key=work.root_key,
        keys=block_keys.unpack(work.block_keys),
        priority=work.priority,
        arrived_s=arrived_s,
        patience_s=work.patience_s,
        tbt_s=work.tbt_s or math.inf,
        tenant=work.tenant,
        prompt_logprobs=prompt_logprobs,
    )


def time_left_s(work: node_pb2.Work, arrived_s: float) -> float | None:
    """Seconds from now to a request's deadline; None: its conductor did not tell it. ``arrived_s``: when its
    message came, by ``time.monotonic``, which neither jumps nor differs."""
    return max(arrived_s + work.left_s - time.monotonic(), 0.0) if work.left_s else None


def token_out(event: StepEvent, spent: Spent) -> node_pb2.TokenOut:
    """Return the message of one event: a token, the end, or a preemption. ``spent``: since the one before."""
    sequence, logprobs = event.sequence, event.logprobs
    return node_pb2.TokenOut(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        has_token=event.token_id >= 0,
        index=max(event.index, 0),
        token_id=max(event.token_id, 0),
        finish_reason=node_pb2.FINISH_ERROR
        if event.ended_life
        else node_pb2.FinishReason.ValueType(event.finish_reason),
        logprobs=None if logprobs is None else token_logprobs(logprobs),
        accepted=event.accepted,
        preempted=event.preempted,
        error=event.error,
        ended_life=event.ended_life,
        invalid=_is_invalid(sequence),
        failure=failure_of_event(event).value if event.error else "",
        busy_s=spent.busy_s,
        rejected_s=spent.rejected_s,
        again_s=spent.again_s,
        prompts_s=spent.prompts_s,
        exchange_s=spent.exchange_s,
    )


def failure_of_event(event: StepEvent) -> FailureClass:
    """What failed, of an event with an error."""
    if event.ended_life:
        return event.lost
    return FailureClass.REQUEST if _is_invalid(event.sequence) else FailureClass.WORKER


def _is_invalid(sequence: Sequence) -> bool:
    return sequence.automaton is not None and bool(sequence.automaton.error)


def token_logprobs(entry: TokenLogprobs) -> node_pb2.TokenLogprobs:
    return node_pb2.TokenLogprobs(
        logprob=entry.logprob, rank=entry.rank, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs
    )
