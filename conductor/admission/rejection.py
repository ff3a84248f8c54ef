"""Rejection policies: when an overloaded cluster rejects a request.

The policies of the Mooncake paper (Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for
LLM Serving", section on overload-oriented scheduling). All are pure, and serve live and simulated requests.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.decode_schedule import DecodeSchedule
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.placement import Placement, Rejection

ARRIVAL = "arrival"
DECODE = "decode"

# The part of the TBT limit that the predicted step may take. Contexts grow, other requests join, and the SLO
# is on the slowest gaps: when requests were admitted up to the limit itself, three in four missed it.
_STEP_PART = 0.9


@dataclass(frozen=True, slots=True)
class DecodeOutlook:
    """The decode node of a placement, and what the request would add to it."""

    view: NodeView
    schedule: DecodeSchedule
    num_tokens: int  # of KV the request brings
    expected_tokens: int  # it will probably produce
    block_size: int
    key: Hashable = None  # the request's own in ``schedule``, once it is there

    def gap_s(self, now_s: float, at_s: float) -> float:
        """Seconds between two tokens if the request joined at ``at_s``; infinite: its KV does not fit."""
        num_sequences, num_tokens = self.schedule.batch_at(now_s, at_s, without=self.key)
        num_tokens += self.num_tokens
        capacity_tokens = self.view.num_blocks * self.block_size
        if capacity_tokens and num_tokens + self.expected_tokens > capacity_tokens:
            return math.inf
        return self.view.cost.step_s(num_sequences + 1, num_tokens, now_s)


@dataclass(frozen=True, slots=True)
class RejectionPolicy:
    """Both methods return None to accept the request. ``slo`` infinite: any latency will do."""

    rejects: bool = True
    checks_decode_at_arrival: bool = False
    looks_ahead: bool = False  # to the decode load when the prefill is done

    def at_arrival(
        self, placement: Placement, decode: DecodeOutlook | None, slo: Slo, now_s: float
    ) -> Rejection | None:
        """Nothing has been computed. ``decode`` None: the request needs no decode node."""
        ttft_s = placement.prefill.ttft_s
        if self.rejects and ttft_s > slo.ttft_s:
            return Rejection(
                f"the first token would take {ttft_s:.3g} s, {slo.ttft_s:.3g} s are allowed",
                retry_after_s=ttft_s - slo.ttft_s,
                stage=ARRIVAL,
            )
        if decode is None or not self.checks_decode_at_arrival:
            return None
        return _slow_decode(decode, slo, now_s, now_s + ttft_s * self.looks_ahead, ARRIVAL)

    def before_decode(self, decode: DecodeOutlook, slo: Slo, now_s: float) -> Rejection | None:
        """The prefill is done; a rejection wastes it."""
        return _slow_decode(decode, slo, now_s, now_s, DECODE) if self.rejects else None


REJECTIONS: Mapping[str, RejectionPolicy] = {
    "none": RejectionPolicy(rejects=False),
    # Checks each stage when the request gets there, and wastes the prefills of requests rejected by decode.
    "baseline": RejectionPolicy(),
    # Does not see the requests in prefill, so that load swings between the two stages.
    "early": RejectionPolicy(checks_decode_at_arrival=True),
    "predicted": RejectionPolicy(checks_decode_at_arrival=True, looks_ahead=True),
}


def _slow_decode(decode: DecodeOutlook, slo: Slo, now_s: float, at_s: float, stage: str) -> Rejection | None:
    gap_s = decode.gap_s(now_s, at_s)
    # A step is one for the whole batch: a request with a long limit must not slow down others.
    tbt_s = min(slo.tbt_s, decode.schedule.least_tbt_s())
    if gap_s <= _STEP_PART * tbt_s:
        return None
    what = "no KV blocks would be free" if gap_s == math.inf else f"a token would take {gap_s:.3g} s"
    return Rejection(
        f"on decode node {decode.view.node_id} {what}; {tbt_s:.3g} s between tokens are allowed",
        retry_after_s=decode.schedule.next_end_s(now_s) - now_s,
        stage=stage,
    )
