"""Means and tails of delays: queues with Poisson arrivals and equal service times."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Placement looks at no more lanes than this at once: a larger cluster waits as this part of it does.
_POOLED = 256
# The 99th percentile of a normal distribution in standard deviations, and of an exponential one in means.
NORMAL_P99 = 2.326
EXPONENTIAL_P99 = math.log(100)


@dataclass(frozen=True, slots=True)
class Delay:
    """``tail_s``: seconds from the mean to the 99th percentile."""

    mean_s: float
    tail_s: float = 0.0

    @property
    def p99_s(self) -> float:
        return self.mean_s + self.tail_s

    def __add__(self, other: Delay) -> Delay:
        """The sum of independent delays: means add, tails as standard deviations do."""
        return Delay(self.mean_s + other.mean_s, math.hypot(self.tail_s, other.tail_s))


def pooled(num_lanes: int) -> int:
    return min(num_lanes, _POOLED)


def queue(num_lanes: int, service_s: float, rate: float) -> Delay | None:
    """The wait of M/D/c: Poisson arrivals, one queue, ``num_lanes`` servers of equal service times.

    Half the wait of M/M/c, in its mean and in the scale of its exponential tail (Kingman's law of heavy
    traffic: the wait scales with the mean of the squared variations of arrivals, 1, and service, 0). One lane
    is exact in the mean: M/D/1, ``load × service / (2 (1 - load))``, as DistServe (OSDI'24, section 3.1) has
    it. None: the queue grows without end.
    """
    lanes = pooled(num_lanes)
    busy = rate * service_s * lanes / num_lanes
    if busy >= lanes:
        return None
    waits = _erlang_c(lanes, busy)
    scale_s = service_s / (2 * (lanes - busy))
    mean_s = waits * scale_s
    p99_s = scale_s * (math.log(waits) + EXPONENTIAL_P99) if waits > 0 else 0.0
    return Delay(mean_s, max(p99_s - mean_s, 0.0))


def shared_link(seconds: float, used: float) -> Delay | None:
    """A transfer that takes ``seconds`` alone, on a link that is ``used`` (a fraction): processor sharing.

    M/G/1-PS: the mean is ``seconds / (1 - used)``. The part that others add is taken as exponential.
    """
    if used >= 1:
        return None
    others_s = seconds * used / (1 - used)
    return Delay(seconds + others_s, others_s * (EXPONENTIAL_P99 - 1))


def _erlang_c(lanes: int, busy: float) -> float:
    """The fraction of arrivals that wait in M/M/c; ``busy``: mean number of busy servers."""
    blocked = 1.0
    for count in range(1, lanes + 1):
        blocked = busy * blocked / (count + busy * blocked)
    return blocked / (1 - busy / lanes * (1 - blocked))
