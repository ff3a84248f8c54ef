"""The engine's events as the messages nodes send."""

from __future__ import annotations

from engine.events import StepEvent, TokenLogprobs
from protos import node_pb2


def token_out(event: StepEvent) -> node_pb2.TokenOut:
    """What the conductor hears of one event: its token, its end, or that it was preempted."""
    sequence = event.sequence
    message = node_pb2.TokenOut(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        finish_reason=node_pb2.FinishReason.ValueType(event.finish_reason),
    )
    if event.token_id >= 0:
        message.has_token = True
        message.index = event.index
        message.token_id = event.token_id
    if event.logprobs is not None:
        message.logprobs.CopyFrom(token_logprobs(event.logprobs))
    if event.preempted:
        message.preempted = True
    if event.error:
        message.error = event.error
    return message


def token_logprobs(entry: TokenLogprobs) -> node_pb2.TokenLogprobs:
    return node_pb2.TokenLogprobs(
        logprob=entry.logprob, rank=entry.rank, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs
    )
