"""Ranges of the numbers that other processes send: by RPC, HTTP, Redis and ZeroMQ.

``BY_FIELD`` has a range for every ``float`` and ``double`` of the services' messages, and for integers that
may not use their whole type. A test finds fields without one. ``message_checks`` applies it to messages;
records in other formats use ``number`` and ``integer``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


@dataclass(frozen=True, slots=True)
class Range:
    """From ``low`` to ``high``, both included. NaN is in no range."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {self.low:.15g} to {self.high:.15g}"


class NumberOutOfRange(MoonpoolError):
    """A number that another process sent is not finite or not in its range. Nothing has been done with it."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST

    def __init__(self, field: str, value: object, allowed: Range, kind: str = "a number") -> None:
        super().__init__(f"{field} must be {kind} {allowed}, got {str(value)[:64]}")
        self.field = field


# Leases, waits and limits: what a process is asked to do for so long.
DURATION_S = Range(0.0, 30 * 86_400.0)
# Differences of two clock readings; parts that overlap may make one negative.
MEASURED_S = Range(-1e9, 1e9)
UNIX_S = Range(0.0, 1e11)  # until the year 5138
NBYTES = Range(0, 1 << 60)
NBYTES_PER_S = Range(0.0, 1e15)
COUNT = Range(0, (1 << 53) - 1)  # what JSON readers keep exactly
FINITE = Range(-1.7976931348623157e308, 1.7976931348623157e308)
_COST_S = Range(0.0, 1e6)
_TOTAL_S = Range(-1e15, 1e15)  # what is given back may make it negative
_LOGPROB = Range(-math.inf, 1e-3)  # -inf: the token was forbidden

BY_FIELD: Mapping[str, Range] = {
    "moonpool.Sampling.temperature": Range(0.0, 100.0),
    "moonpool.Sampling.top_p": Range(0.0, 1.0),
    "moonpool.Sampling.top_k": Range(-1, (1 << 31) - 1),
    "moonpool.Sampling.min_p": Range(0.0, 1.0),
    "moonpool.Sampling.presence_penalty": Range(-2.0, 2.0),
    "moonpool.Sampling.frequency_penalty": Range(-2.0, 2.0),
    "moonpool.Sampling.repetition_penalty": Range(0.0, 100.0),
    "moonpool.Sampling.logit_bias": Range(-100.0, 100.0),
    "moonpool.Sampling.num_logprobs": Range(-1, 1 << 20),
    "moonpool.Work.left_s": DURATION_S,
    "moonpool.Work.patience_s": MEASURED_S,
    "moonpool.Work.tbt_s": DURATION_S,
    "moonpool.Adapter.loaded_unix_s": UNIX_S,
    "moonpool.Adapter.rank": Range(0, 256),
    "moonpool.LoadAdapterRequest.loaded_unix_s": UNIX_S,
    "moonpool.SwitchRequest.limit_s": DURATION_S,
    "moonpool.Work.tenant_cached_nbytes": NBYTES,
    "moonpool.TokenLogprobs.logprob": _LOGPROB,
    "moonpool.TokenLogprobs.top_logprobs": _LOGPROB,
    "moonpool.Stretch.ago_s": MEASURED_S,
    "moonpool.Stretch.seconds": MEASURED_S,
    "moonpool.KvAddress.block_nbytes": NBYTES,
    "moonpool.BlockSpans.offset": NBYTES,
    "moonpool.ExpertLoadReply.skew": Range(0.0, 1e9),
    "moonpool.Profile.prefill_base_s": _COST_S,
    "moonpool.Profile.prefill_token_s": _COST_S,
    "moonpool.Profile.prefill_attention_s": _COST_S,
    "moonpool.Profile.decode_base_s": _COST_S,
    "moonpool.Profile.decode_sequence_s": _COST_S,
    "moonpool.Profile.decode_context_s": _COST_S,
    "moonpool.Profile.host_load_nbytes_per_s": NBYTES_PER_S,
    "moonpool.Profile.ssd_load_nbytes_per_s": NBYTES_PER_S,
    "moonpool.BookedLoad.prefill_s": DURATION_S,
    "moonpool.BookRequest.prefill_s": DURATION_S,
    "moonpool.NodeChoice.ttft_s": MEASURED_S,  # without foreign load: it may be negative
    "moonpool.TenantUse.weight": Range(0.0, 1e6),
    "moonpool.TenantUse.tokens_per_minute": COUNT,
    "moonpool.TenantUse.prefill_s": _TOTAL_S,
    "moonpool.TenantUse.decode_s": _TOTAL_S,
    "moonpool.Demand.num_requests": COUNT,
    "moonpool.Demand.num_rejected": COUNT,
    "moonpool.Demand.prefill_s": Range(0.0, 1e15),
    "moonpool.Demand.prefill_s2": Range(0.0, 1e21),
    "moonpool.Demand.prompt_tokens": COUNT,
    "moonpool.Demand.hit_tokens": COUNT,
    "moonpool.Demand.num_first_tokens": COUNT,
    "moonpool.Demand.num_ttft_within": COUNT,
    "moonpool.Demand.num_decoded": COUNT,
    "moonpool.Demand.num_tbt_within": COUNT,
    "moonpool.Demand.output_tokens": COUNT,
    "moonpool.LeaseRequest.ttl_s": DURATION_S,
    "moonpool.HintRequest.keep_s": DURATION_S,
    "moonpool.HintRequest.tenant_cached_nbytes": NBYTES,
    "moonpool.LeaseReply.granted_s": DURATION_S,
    "moonpool.RenewRequest.ttl_s": DURATION_S,
    "moonpool.RenewReply.granted_s": DURATION_S,
    "moonpool.ReplicateReply.seconds": MEASURED_S,
    "moonpool.SuppliedNode.age_s": MEASURED_S,
    "moonpool.SuppliedNode.drain_s": MEASURED_S,
    "moonpool.PrefillReply.queued_s": MEASURED_S,
    "moonpool.PrefillReply.fetch_s": MEASURED_S,
    "moonpool.PrefillReply.compute_s": MEASURED_S,
    "moonpool.PrefillReply.load_s": MEASURED_S,
    "moonpool.PrefillReply.disk_s": MEASURED_S,
    "moonpool.PrefillReply.stale_s": MEASURED_S,
    "moonpool.KvChunk.granted_s": DURATION_S,
    "moonpool.TokenOut.busy_s": _COST_S,
    "moonpool.TokenOut.rejected_s": _COST_S,
    "moonpool.TokenOut.again_s": _COST_S,
    "moonpool.TokenOut.prompts_s": _COST_S,
    "moonpool.TokenOut.exchange_s": _COST_S,
    "moonpool.KvReceived.seconds": MEASURED_S,
    "moonpool.KvReceived.stopped_s": MEASURED_S,
    "moonpool.ObjectInfo.nbytes": NBYTES,
    "moonpool.ObjectInfo.shape": NBYTES,
    "moonpool.BeginRequest.ttl_s": DURATION_S,
    "moonpool.PutReply.granted_s": DURATION_S,
    "moonpool.OpenRequest.ttl_s": DURATION_S,
    "moonpool.OpenReply.granted_s": DURATION_S,
    "moonpool.OpenObject.first_chunk": NBYTES,
    "moonpool.CopyReply.seconds": MEASURED_S,
}


def number(field: str, value: object, allowed: Range) -> float:
    """``value``, a number in range, as a float. ``field`` is for the error. Raises ``NumberOutOfRange``."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value not in allowed:
        raise NumberOutOfRange(field, value, allowed)
    return float(value)


def integer(field: str, value: object, allowed: Range) -> int:
    """``value``, which must be an integer in range. Raises ``NumberOutOfRange``."""
    if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
        raise NumberOutOfRange(field, value, allowed, "an integer")
    return value
