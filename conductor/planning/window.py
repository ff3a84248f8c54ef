"""The recent demand: rates, trend and attainment, from totals that are read every few seconds."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from moonpool.conductor.observing.demand import Demand
from moonpool.conductor.planning.loads import PrefillLoad

# The latest rate is over ``SHORT_S``; the trend compares it with that over ``LONG_S``.
SHORT_S = 30.0
LONG_S = 120.0
# What arrives now is judged by this time: a burst begins within seconds.
_LATEST_S = 4.0
# A rise that chance explains is no trend: so many standard deviations of a count. Requests come in bursts, so
# the deviation is that of the counts as they were.
_DEVIATIONS = 2.0
_MOST_GROWTH = 2.0
# With fewer requests, a fraction of them says little.
_ENOUGH = 20


@dataclass(frozen=True, slots=True)
class Recent:
    """``growth``: ratio of the rate when a node that starts now serves to the rate now, as a trend tells.

    Attainment: fractions within the SLO over ``LONG_S``; None: too few requests.
    """

    requests_per_s: float = 0.0
    growth: float = 1.0
    compute_s: float = 0.0
    variation: float = 1.0
    hit_ratio: float = 0.0
    prompt_tokens: float = 0.0  # mean
    output_tokens: float = 0.0  # mean
    ttft_attained: float | None = None
    tbt_attained: float | None = None
    mean_per_s: float = 0.0  # requests, over ``LONG_S``
    latest_nodes: float = 0.0  # that the work of the latest requests keeps busy

    def prefill(self, queued_s: float) -> PrefillLoad:
        """What prefill nodes will have to do by then."""
        rate = self.requests_per_s * self.growth
        return PrefillLoad(rate, self.compute_s, self.variation, queued_s, self.mean_per_s, self.latest_nodes)


class DemandWindow:
    """Totals of the last two minutes."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, Demand]] = deque()

    def add(self, now_s: float, total: Demand) -> None:
        self._totals.append((now_s, total))
        while len(self._totals) > 2 and now_s - self._totals[1][0] >= LONG_S:
            self._totals.popleft()

    def recent(self, join_s: float) -> Recent:
        """``join_s``: how long a node takes to join."""
        if len(self._totals) < 2:
            return Recent()
        now_s, total = self._totals[-1]
        began_s, first = self._totals[0]
        since_s, short = self._before(SHORT_S)
        latest_s, before = self._before(_LATEST_S)
        long, latest = total.minus(first), total.minus(short)
        long_s, short_s = max(now_s - began_s, 1e-9), max(now_s - since_s, 1e-9)
        count, placed = latest.num_requests, long.num_requests
        rate, mean_rate = count / short_s, placed / long_s
        compute_s = long.prefill_s / placed if placed else 0.0
        square = long.prefill_s2 / placed if placed else 0.0
        variation = max(square / compute_s**2 - 1, 0.0) if compute_s else 1.0
        noise = _DEVIATIONS * math.sqrt(max(count, 1) * self._dispersion()) / short_s
        growth, rises = 1.0, rate > mean_rate + noise
        if rises and long_s > short_s:
            # The middles of both windows are so far apart.
            slope = (rate - mean_rate) / ((long_s - short_s) / 2)
            growth = min(1 + slope * (join_s + short_s / 2) / rate, _MOST_GROWTH)
        first_tokens = long.num_first_tokens + long.num_rejected
        return Recent(
            requests_per_s=rate if rises else mean_rate,
            growth=growth,
            compute_s=compute_s,
            variation=variation,
            hit_ratio=long.hit_tokens / long.prompt_tokens if long.prompt_tokens else 0.0,
            prompt_tokens=long.prompt_tokens / placed if placed else 0.0,
            output_tokens=long.output_tokens / max(long.num_first_tokens, 1),
            ttft_attained=long.num_ttft_within / first_tokens if first_tokens >= _ENOUGH else None,
            tbt_attained=long.num_tbt_within / long.num_decoded if long.num_decoded >= _ENOUGH else None,
            mean_per_s=mean_rate,
            latest_nodes=total.minus(before).prefill_s / max(now_s - latest_s, 1e-9),
        )

    def _before(self, seconds: float) -> tuple[float, Demand]:
        """The latest totals that are so old, or the oldest."""
        now_s = self._totals[-1][0]
        older = (one for one in reversed(self._totals) if now_s - one[0] >= seconds)
        return next(older, self._totals[0])

    def _dispersion(self) -> float:
        """Variance over mean of the counts between two readings; 1: they are independent, or more even."""
        counts = [
            after.num_requests - before.num_requests for (_, before), (_, after) in pairwise(self._totals)
        ]
        mean = sum(counts) / len(counts)
        if not mean:
            return 1.0
        return max(sum((one - mean) ** 2 for one in counts) / len(counts) / mean, 1.0)
