"""Whom an overloaded cluster turns away, and when: rejection policies by name.

Those of the Mooncake paper (Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM
Serving", section on overload-oriented scheduling). All are pure, and serve live requests and simulated ones.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.decode_schedule import DecodeSchedule
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.placement import Placement, Rejection

ARRIVAL = "arrival"
DECODE = "decode"

# Of the time allowed between tokens, what a request may be predicted to take when it joins: contexts grow,
# others join, and an SLO is on the slowest gaps. Admitting up to the limit itself, three requests in four
# missed it.
_STEP_PART = 0.9


@dataclass(frozen=True, slots=True)
class DecodeOutlook:
    """The decode node that a request was placed on, and what the request would add to it."""

    view: NodeView
    schedule: DecodeSchedule
    num_tokens: int  # of KV the request brings
    expected_tokens: int  # it will probably add
    block_size: int
    key: Hashable = None  # the request's own in ``schedule``, once it is there

    def gap_s(self, now_s: float, at_s: float) -> float:
        """Seconds between two tokens if the request joined at ``at_s``; infinite: there would be no room."""
        num_sequences, num_tokens = self.schedule.batch_at(now_s, at_s, without=self.key)
        num_tokens += self.num_tokens
        capacity_tokens = self.view.num_blocks * self.block_size
        if capacity_tokens and num_tokens + self.expected_tokens > capacity_tokens:
            return math.inf
        return self.view.cost.step_s(num_sequences + 1, num_tokens, now_s)


class RejectionPolicy(Protocol):
    """Both answer None to let the request go on. ``slo`` infinite: any latency will do."""

    def at_arrival(
        self, placement: Placement, decode: DecodeOutlook | None, slo: Slo, now_s: float
    ) -> Rejection | None:
        """Nothing has been computed. ``decode`` None: the request needs no decode node."""
        ...

    def before_decode(self, decode: DecodeOutlook, slo: Slo, now_s: float) -> Rejection | None:
        """The prefill is done; a rejection wastes it."""
        ...


class AcceptAll:
    """Lets requests wait as long as it takes."""

    def at_arrival(
        self, placement: Placement, decode: DecodeOutlook | None, slo: Slo, now_s: float
    ) -> Rejection | None:
        return None

    def before_decode(self, decode: DecodeOutlook, slo: Slo, now_s: float) -> Rejection | None:
        return None


class Baseline(AcceptAll):
    """Looks at each stage when the request gets there: prefills are wasted on whom decode rejects."""

    def at_arrival(
        self, placement: Placement, decode: DecodeOutlook | None, slo: Slo, now_s: float
    ) -> Rejection | None:
        return _late_prefill(placement, slo)

    def before_decode(self, decode: DecodeOutlook, slo: Slo, now_s: float) -> Rejection | None:
        return _slow_decode(decode, slo, now_s, now_s, DECODE)


class Early(Baseline):
    """Looks at both stages at arrival, as they are at that moment, and at decode again when it gets there.

    Decode's load at arrival is not what the request will meet: those in prefill are not seen, so that load
    swings between the two stages.
    """

    def at_arrival(
        self, placement: Placement, decode: DecodeOutlook | None, slo: Slo, now_s: float
    ) -> Rejection | None:
        if rejection := _late_prefill(placement, slo):
            return rejection
        return None if decode is None else _slow_decode(decode, slo, now_s, now_s, ARRIVAL)


class Predicted(Baseline):
    """Looks at decode's load as it will be when the prefill is done: who will be gone, who will have come."""

    def at_arrival(
        self, placement: Placement, decode: DecodeOutlook | None, slo: Slo, now_s: float
    ) -> Rejection | None:
        if rejection := _late_prefill(placement, slo):
            return rejection
        at_s = now_s + placement.prefill.ttft_s
        return None if decode is None else _slow_decode(decode, slo, now_s, at_s, ARRIVAL)


REJECTIONS: Mapping[str, RejectionPolicy] = {
    "none": AcceptAll(),
    "baseline": Baseline(),
    "early": Early(),
    "predicted": Predicted(),
}


def _late_prefill(placement: Placement, slo: Slo) -> Rejection | None:
    ttft_s = placement.prefill.ttft_s
    if ttft_s <= slo.ttft_s:
        return None
    return Rejection(
        f"the first token would take {ttft_s:.3g} s, {slo.ttft_s:.3g} s are allowed",
        retry_after_s=ttft_s - slo.ttft_s,
        stage=ARRIVAL,
    )


def _slow_decode(decode: DecodeOutlook, slo: Slo, now_s: float, at_s: float, stage: str) -> Rejection | None:
    gap_s = decode.gap_s(now_s, at_s)
    if gap_s <= _STEP_PART * slo.tbt_s:
        return None
    what = "no KV blocks would be free" if gap_s == math.inf else f"a token would take {gap_s:.3g} s"
    return Rejection(
        f"on decode node {decode.view.node_id} {what}; {slo.tbt_s:.3g} s between tokens are allowed",
        retry_after_s=decode.schedule.next_end_s(now_s) - now_s,
        stage=stage,
    )
