"""What moving bytes between two nodes costs: a latency and a rate, learned pair by pair."""

from __future__ import annotations

from dataclasses import dataclass

# Before the first transfer: what shared memory and TCP on one host gave where it was measured.
_LATENCY_S = 0.5e-3
_BYTES_PER_S = 2e9

# The weight of the past after one more measurement; about the last eight count.
_KEEP = 7 / 8
# No single measurement counts as more than so many times what was expected.
_SURPRISE = 4.0
# The expectation above counts as two measurements, one of each of these sizes, that are never forgotten: it
# keeps the slope finite when every transfer had the same size.
_PRIOR_NBYTES = (0.0, 4e6)


@dataclass(slots=True)
class LinkCost:
    """Seconds as a line over bytes, fitted by least squares whose weights fade with age."""

    count: float = 0.0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0
    latency_s: float = _LATENCY_S
    byte_s: float = 1 / _BYTES_PER_S

    def observe(self, nbytes: int, actual_s: float) -> None:
        # A reader that lost its core for a moment must not make the link look slow for the next eight.
        actual_s = min(actual_s, _SURPRISE * self.seconds(nbytes))
        self.count = self.count * _KEEP + 1
        self.sum_x = self.sum_x * _KEEP + nbytes
        self.sum_y = self.sum_y * _KEEP + actual_s
        self.sum_xx = self.sum_xx * _KEEP + nbytes * nbytes
        self.sum_xy = self.sum_xy * _KEEP + nbytes * actual_s
        self._fit()

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes * self.byte_s if nbytes else 0.0

    def _fit(self) -> None:
        prior = [(x, _LATENCY_S + x / _BYTES_PER_S) for x in _PRIOR_NBYTES]
        count = self.count + len(prior)
        sum_x = self.sum_x + sum(x for x, _ in prior)
        sum_y = self.sum_y + sum(y for _, y in prior)
        sum_xx = self.sum_xx + sum(x * x for x, _ in prior)
        sum_xy = self.sum_xy + sum(x * y for x, y in prior)
        spread = count * sum_xx - sum_x * sum_x
        slope = (count * sum_xy - sum_x * sum_y) / spread
        # Noise can tilt the line below zero; neither a byte nor a beginning costs less than nothing.
        self.byte_s = max(slope, 0.0)
        self.latency_s = max((sum_y - self.byte_s * sum_x) / count, 0.0)


class LinkModel:
    """The cost of every pair of nodes that has moved something; others are taken to be like the average."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._pairs: dict[tuple[str, str], LinkCost] = {}
        self._any = LinkCost()

    def seconds(self, source: str, target: str, nbytes: int) -> float:
        """Predicted seconds to read ``nbytes`` of ``source`` into ``target``; nothing costs nothing."""
        return self._pairs.get((source, target), self._any).seconds(nbytes)

    def observe(self, source: str, target: str, nbytes: int, actual_s: float) -> None:
        if nbytes <= 0 or actual_s <= 0:
            return
        link = self._pairs.get((source, target))
        if link is not None:
            link.observe(nbytes, actual_s)
            self._any.observe(nbytes, actual_s)
            return
        # The first transfer of a pair connects the two, and no other one will: nothing is learned from it.
        # Nodes come and go under new names: the oldest pair makes room.
        if len(self._pairs) >= self._capacity:
            del self._pairs[next(iter(self._pairs))]
        self._pairs[source, target] = LinkCost()
