"""What moving bytes between two nodes costs: latency and rate, learned pair by pair, and who shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Before the first transfer: what shared memory and TCP on one host gave where it was measured.
_LATENCY_S = 0.5e-3
_BYTES_PER_S = 2e9
# What the first transfer of a pair costs besides, which connects the two.
_CONNECT_S = 12e-3

# The weight of the past after one more measurement; about the last eight count.
_KEEP = 7 / 8
# No single measurement counts as more than so many times what was expected.
_SURPRISE = 4.0
# The expectation above counts as two measurements, of no bytes and of this many, that are never forgotten: it
# keeps the slope finite when every transfer had the same size. Once the nodes themselves have measured the
# link, its rate is theirs, and its size that of what is observed, so that it weighs as much as one of those.
_PRIOR_NBYTES = 4e6


@dataclass(slots=True)
class LinkCost:
    """Seconds as a line over bytes, fitted by least squares whose weights fade with age."""

    usual_latency_s: float = _LATENCY_S
    usual_byte_s: float = 1 / _BYTES_PER_S
    count: float = 0.0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0
    prior_nbytes: float = _PRIOR_NBYTES
    latency_s: float = field(init=False)
    byte_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.latency_s, self.byte_s = self.usual_latency_s, self.usual_byte_s

    def observe(self, nbytes: int, actual_s: float) -> None:
        # A reader that lost its core for a moment must not make the link look slow for the next eight.
        actual_s = min(actual_s, _SURPRISE * self.seconds(nbytes))
        self.count = self.count * _KEEP + 1
        self.sum_x = self.sum_x * _KEEP + nbytes
        self.sum_y = self.sum_y * _KEEP + actual_s
        self.sum_xx = self.sum_xx * _KEEP + nbytes * nbytes
        self.sum_xy = self.sum_xy * _KEEP + nbytes * actual_s
        self._fit()

    def expect(self, byte_s: float) -> None:
        """The nodes have measured the link since: what was observed before counts for less."""
        if byte_s == self.usual_byte_s:
            return
        self.usual_byte_s = byte_s
        if self.count:
            self.prior_nbytes = max(_PRIOR_NBYTES, self.sum_x / self.count)
        self.count *= _KEEP
        self.sum_x *= _KEEP
        self.sum_y *= _KEEP
        self.sum_xx *= _KEEP
        self.sum_xy *= _KEEP
        self._fit()

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes * self.byte_s if nbytes else 0.0

    def _fit(self) -> None:
        prior = [(x, self.usual_latency_s + x * self.usual_byte_s) for x in (0.0, self.prior_nbytes)]
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


@dataclass(frozen=True, slots=True)
class _Flow:
    """A transfer under way, taken to go on evenly until it is predicted to end."""

    source: str
    target: str
    nbytes: int
    began_s: float
    ends_s: float

    def left_nbytes(self, now_s: float) -> float:
        return self.nbytes * (self.ends_s - now_s) / (self.ends_s - self.began_s)


class LinkModel:
    """The cost of every pair of nodes that has moved something; others are taken to be like the average.

    Transfers under way share the links of both their nodes with the next one, evenly.
    """

    def __init__(
        self,
        capacity: int = 4096,
        *,
        latency_s: float = _LATENCY_S,
        nbytes_per_s: float = _BYTES_PER_S,
        connect_s: float = _CONNECT_S,
    ) -> None:
        """``latency_s`` and ``nbytes_per_s`` are what is expected before anything was measured, ``connect_s``
        what a pair's first transfer costs besides.
        """
        self._connect_s = connect_s
        self._capacity = capacity
        self._usual = (latency_s, 1 / nbytes_per_s)
        self._pairs: dict[tuple[str, str], LinkCost] = {}
        self._any = LinkCost(*self._usual)
        self._flows: list[_Flow] = []

    @property
    def usual(self) -> tuple[float, float]:
        """Seconds of latency and seconds a byte between two nodes nothing is known of."""
        return self._any.latency_s, self._any.byte_s

    def seconds(
        self, source: str, target: str, nbytes: int, now_s: float, *, connected: bool = False
    ) -> float:
        """Predicted seconds to read ``nbytes`` of ``source`` into ``target`` from now on; nothing costs
        nothing. ``connected``: they will have connected by then, if they have not yet.
        """
        if not nbytes:
            return 0.0
        link = self._pairs.get((source, target))
        shared = self._shared_nbytes(source, target, nbytes, now_s) if self._flows else 0.0
        if link is not None:
            return link.seconds(nbytes + shared)
        return self._any.seconds(nbytes + shared) + (0.0 if connected else self._connect_s)

    def begin(self, source: str, target: str, nbytes: int, now_s: float) -> None:
        """A transfer begins. It is forgotten when it should have ended."""
        self._flows = [flow for flow in self._flows if flow.ends_s > now_s]
        if nbytes > 0:
            ends_s = now_s + self.seconds(source, target, nbytes, now_s)
            if ends_s > now_s:
                self._flows.append(_Flow(source, target, nbytes, now_s, ends_s))

    def busy(self, now_s: float) -> Mapping[str, float]:
        """Bytes that are on their way from each node; nodes from which there are none are left out."""
        busy: dict[str, float] = {}
        for flow in self._flows:
            if flow.ends_s > now_s:
                busy[flow.source] = busy.get(flow.source, 0.0) + flow.left_nbytes(now_s)
        return busy

    def observe(self, source: str, target: str, nbytes: int, actual_s: float) -> None:
        if nbytes <= 0 or actual_s <= 0:
            return
        link = self._pairs.get((source, target))
        if link is not None:
            link.observe(nbytes, actual_s)
            self._any.observe(nbytes, actual_s)
            return
        # The first transfer of a pair connects the two, and no other one will: nothing is learned from it.
        self._meet(source, target)

    def measured(self, source: str, target: str, nbytes_per_s: float) -> None:
        """``target`` says how fast it has lately read from ``source``, or written to it: that is where the
        pair's cost starts from, and what it follows where nothing is observed here.
        """
        if not 0 < nbytes_per_s < math.inf:
            return
        byte_s = 1 / nbytes_per_s
        link = self._pairs.get((source, target))
        if link is None:
            # What was observed is worth more than a new pair.
            if len(self._pairs) >= self._capacity:
                return
            link = self._meet(source, target)
        elif link.usual_byte_s == byte_s:
            return
        link.expect(byte_s)
        self._any.expect(self._any.usual_byte_s + (byte_s - self._any.usual_byte_s) * (1 - _KEEP))

    def _meet(self, source: str, target: str) -> LinkCost:
        # Nodes come and go under new names: the oldest pair makes room.
        if len(self._pairs) >= self._capacity:
            del self._pairs[next(iter(self._pairs))]
        link = self._pairs[source, target] = LinkCost(*self._usual)
        return link

    def _shared_nbytes(self, source: str, target: str, nbytes: int, now_s: float) -> float:
        """What moves over the busier of the two nodes' links while ``nbytes`` do, in even shares."""
        out = into = 0.0
        for flow in self._flows:
            if flow.ends_s > now_s and (flow.source == source or flow.target == target):
                share = min(flow.left_nbytes(now_s), nbytes)
                out += share * (flow.source == source)
                into += share * (flow.target == target)
        return max(out, into)
