"""Seconds that bytes take between two nodes: latency and rate, learned per pair, and sharing of links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.conductor.costs.regions import NEAR, RegionLinks

# Before the first transfer: shared memory and TCP on one host, as measured.
_LATENCY_S = 0.5e-3
_BYTES_PER_S = 2e9
# The first transfer of a pair also connects the two.
_CONNECT_S = 12e-3

# The weight of the past after one more measurement: about the last eight count.
_KEEP = 7 / 8
# A single measurement counts as at most this many times the expectation.
_SURPRISE = 4.0
# The prior counts as two measurements, of no bytes and of this many, that are never forgotten: it keeps the
# slope finite when every transfer had the same size. When nodes have measured the link themselves, the prior
# has their rate and the mean size of the observed transfers, so that it weighs as much as one of those.
_PRIOR_NBYTES = 4e6


@dataclass(slots=True)
class LinkCost:
    """Seconds as a line over bytes: a least-squares fit with weights that fade with age."""

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
        self._fade()
        self.count += 1
        self.sum_x += nbytes
        self.sum_y += actual_s
        self.sum_xx += nbytes * nbytes
        self.sum_xy += nbytes * actual_s
        self._fit()

    def expect(self, byte_s: float) -> None:
        """The nodes have measured the link: earlier observations count for less."""
        if byte_s == self.usual_byte_s:
            return
        self.usual_byte_s = byte_s
        if self.count:
            self.prior_nbytes = max(_PRIOR_NBYTES, self.sum_x / self.count)
        self._fade()
        self._fit()

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes * self.byte_s if nbytes else 0.0

    def _fade(self) -> None:
        self.count *= _KEEP
        self.sum_x *= _KEEP
        self.sum_y *= _KEEP
        self.sum_xx *= _KEEP
        self.sum_xy *= _KEEP

    def _fit(self) -> None:
        x, y = self.prior_nbytes, self.usual_latency_s + self.prior_nbytes * self.usual_byte_s
        count, sum_x, sum_y = self.count + 2, self.sum_x + x, self.sum_y + self.usual_latency_s + y
        sum_xx, sum_xy = self.sum_xx + x * x, self.sum_xy + x * y
        slope = (count * sum_xy - sum_x * sum_y) / (count * sum_xx - sum_x * sum_x)
        # Noise can tilt the line below zero; neither bytes nor latency cost less than nothing.
        self.byte_s = max(slope, 0.0)
        self.latency_s = max((sum_y - self.byte_s * sum_x) / count, 0.0)


@dataclass(frozen=True, slots=True)
class _Flow:
    """A transfer in progress, assumed to run evenly until its predicted end."""

    source: str
    target: str
    nbytes: int
    began_s: float
    ends_s: float

    def left_nbytes(self, now_s: float) -> float:
        return self.nbytes * (self.ends_s - now_s) / (self.ends_s - self.began_s)


class LinkModel:
    """Costs of all pairs of nodes; a pair without transfers is assumed to be average, or as the link between
    its nodes' regions was configured. What is measured of a pair counts more than either.

    A transfer shares the links of both its nodes evenly with the transfers in progress there.
    """

    def __init__(
        self,
        capacity: int = 4096,
        *,
        latency_s: float = _LATENCY_S,
        nbytes_per_s: float = _BYTES_PER_S,
        connect_s: float = _CONNECT_S,
        regions: RegionLinks | None = None,
    ) -> None:
        """``latency_s`` and ``nbytes_per_s``: before any measurement; ``connect_s``: extra cost of a pair's
        first transfer.
        """
        self.regions = regions or RegionLinks()
        self._region_of: dict[str, str] = {}  # by node, of those that have one
        self._connect_s = connect_s
        self._capacity = capacity
        self._usual = (latency_s, 1 / nbytes_per_s)
        self._pairs: dict[tuple[str, str], LinkCost] = {}  # in the order of their latest transfer
        self._any = LinkCost(*self._usual)
        self._flows: list[_Flow] = []

    @property
    def usual(self) -> tuple[float, float]:
        """Seconds of latency, and seconds a byte, of an unknown pair."""
        return self._any.latency_s, self._any.byte_s

    def seconds(
        self, source: str, target: str, nbytes: int, now_s: float, *, connected: bool = False
    ) -> float:
        """Predicted seconds to read ``nbytes`` of ``source`` into ``target``; 0 for no bytes.

        ``connected``: the pair will be connected by then in any case.
        """
        if not nbytes:
            return 0.0
        link = self._pairs.get((source, target))
        shared = self._shared_nbytes(source, target, nbytes, now_s) if self._flows else 0.0
        if link is not None:
            return link.seconds(nbytes + shared)
        cost = self._between_regions(source, target) or self._any
        return cost.seconds(nbytes + shared) + (0.0 if connected else self._connect_s)

    def place(self, node_id: str, region: str) -> None:
        """Note where a node is; empty: it is gone, or has no region."""
        if region:
            self._region_of[node_id] = region
        else:
            self._region_of.pop(node_id, None)

    def region_of(self, node_id: str) -> str:
        """Empty: it has none."""
        return self._region_of.get(node_id, "")

    def egress_s(self, source: str, target: str, nbytes: float) -> float:
        """The price of moving ``nbytes`` between two nodes, as seconds (see ``RegionLinks``)."""
        if not self.regions:
            return 0.0
        return self.regions.egress_s(self.region_of(source), self.region_of(target), nbytes)

    def is_free(self, source: str, target: str) -> bool:
        """Whether bytes between two nodes cost no money."""
        return not self.egress_s(source, target, 1.0)

    def begin(self, source: str, target: str, nbytes: int, now_s: float) -> None:
        """A transfer begins. It is forgotten at its predicted end."""
        self._flows = [flow for flow in self._flows if flow.ends_s > now_s]
        if nbytes > 0:
            ends_s = now_s + self.seconds(source, target, nbytes, now_s)
            if ends_s > now_s:
                self._flows.append(_Flow(source, target, nbytes, now_s, ends_s))

    def busy(self, now_s: float) -> Mapping[str, float]:
        """Bytes still to be read from each node; nodes without any are left out."""
        busy: dict[str, float] = {}
        for flow in self._flows:
            if flow.ends_s > now_s:
                busy[flow.source] = busy.get(flow.source, 0.0) + flow.left_nbytes(now_s)
        return busy

    def observe(self, source: str, target: str, nbytes: int, actual_s: float) -> None:
        if nbytes <= 0 or actual_s <= 0:
            return
        link = self._pairs.pop((source, target), None)
        if link is not None:
            self._pairs[source, target] = link  # the latest used comes last
            link.observe(nbytes, actual_s)
            if self._between_regions(source, target) is None:
                self._any.observe(nbytes, actual_s)
        else:
            # The first transfer of a pair also connects the two, so nothing is learned from it.
            self._add_pair(source, target)

    def measured(self, source: str, target: str, nbytes_per_s: float) -> None:
        """``target`` reports its rate from ``source``: the prior of the pair's cost."""
        if not 0 < nbytes_per_s < math.inf:
            return
        byte_s = 1 / nbytes_per_s
        link = self._pairs.get((source, target))
        if link is None:
            # Observed pairs are worth more than a new one.
            if len(self._pairs) >= self._capacity:
                return
            link = self._add_pair(source, target)
        elif link.usual_byte_s == byte_s:
            return
        link.expect(byte_s)
        if self._between_regions(source, target) is None:
            self._any.expect(self._any.usual_byte_s + (byte_s - self._any.usual_byte_s) * (1 - _KEEP))

    def _add_pair(self, source: str, target: str) -> LinkCost:
        # Nodes return under new names: the pair that was not used for longest makes room.
        if len(self._pairs) >= self._capacity:
            del self._pairs[next(iter(self._pairs))]
        link = self._pairs[source, target] = self._between_regions(source, target) or LinkCost(*self._usual)
        return link

    def _between_regions(self, source: str, target: str) -> LinkCost | None:
        """A pair's cost as configured, before any measurement; None: nothing is configured for it."""
        if not self.regions:
            return None
        link = self.regions.between(self.region_of(source), self.region_of(target))
        if link is NEAR:
            return None
        latency_s, byte_s = self._usual
        return LinkCost(latency_s + link.rtt_s, max(byte_s, 1 / link.nbytes_per_s))

    def _shared_nbytes(self, source: str, target: str, nbytes: int, now_s: float) -> float:
        """Bytes of other transfers over the busier of the two links while ``nbytes`` move."""
        out = into = 0.0
        for flow in self._flows:
            if flow.ends_s > now_s and (flow.source == source or flow.target == target):
                moved = min(flow.left_nbytes(now_s), nbytes)
                out += moved * (flow.source == source)
                into += moved * (flow.target == target)
        return max(out, into)
