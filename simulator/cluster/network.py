"""Transfers between nodes in virtual time; they share the bandwidth of links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.conductor.costs.regions import NEAR, RegionLink
from moonpool.simulator.cluster.clock import Clock, Event


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer: ``left_nbytes`` at ``since_s``, decreasing by ``rate``."""

    source: str
    target: str
    nbytes: float
    done: Callable[[], None]
    left_nbytes: float
    since_s: float
    rate: float = 0.0  # bytes a second
    end: Event | None = None


class Network:
    """A link out and a link in for every node. A flow gets the smaller of its even parts of both.

    ``factors``: by node, its link's bandwidth over ``nbytes_per_s``. A flow between regions is not faster
    than their link, which each has for itself, and costs money: ``egress`` in all.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        nbytes_per_s: float,
        latency_s: float,
        between: Callable[[str, str], RegionLink] = lambda source, target: NEAR,
    ) -> None:
        self._clock = clock
        self._nbytes_per_s = nbytes_per_s
        self._latency_s = latency_s
        # Dicts keep the order of flows; sets would make it depend on memory addresses.
        self._out: dict[str, dict[Flow, None]] = defaultdict(dict)
        self._in: dict[str, dict[Flow, None]] = defaultdict(dict)
        self._between = between
        self.moved_nbytes = 0.0
        self.egress = 0.0
        self.factors: dict[str, float] = {}

    def start(self, source: str, target: str, nbytes: float, done: Callable[[], None]) -> Flow:
        """Move ``nbytes``; call ``done`` when the last has arrived, or ``source`` has failed (``lose``)."""
        flow = Flow(source, target, nbytes, done, nbytes, self._clock.now_s)
        self._out[source][flow] = None
        self._in[target][flow] = None
        self._share(source, target)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Stop the flow; ``done`` is not called. Idempotent, also after the end."""
        if flow.end is not None:
            flow.end.cancel()
            flow.end = None
        self._remove(flow)

    def lose(self, source: str) -> None:
        """The node has failed: its flows to others end now, incomplete. ``done`` of each is called."""
        for flow in list(self._out[source]):
            self.cancel(flow)
            flow.end = self._clock.at(self._clock.now_s, flow.done)

    def _remove(self, flow: Flow) -> None:
        if flow in self._out[flow.source]:
            self._settle(flow)
            self.sent(flow.source, flow.target, flow.nbytes - max(flow.left_nbytes, 0.0))
            del self._out[flow.source][flow], self._in[flow.target][flow]
            self._share(flow.source, flow.target)

    def rate_of(self, source: str, target: str) -> float:
        """Bytes a second of a flow that has the links for itself."""
        factor = min(self.factors.get(source, 1.0), self.factors.get(target, 1.0))
        return min(self._nbytes_per_s * factor, self._between(source, target).nbytes_per_s)

    def sent(self, source: str, target: str, nbytes: float) -> None:
        """Count bytes that were moved, by a flow or beside all flows."""
        self.moved_nbytes += nbytes
        self.egress += nbytes * self._between(source, target).price

    def _share(self, source: str, target: str) -> None:
        """Update the rates of all flows on the links out of ``source`` and into ``target``."""
        for flow in self._out[source] | self._in[target]:
            self._settle(flow)
            out = self.factors.get(flow.source, 1.0) / len(self._out[flow.source])
            into = self.factors.get(flow.target, 1.0) / len(self._in[flow.target])
            most = self._between(flow.source, flow.target).nbytes_per_s
            flow.rate = min(self._nbytes_per_s * min(out, into), most)
            if flow.end is not None:
                flow.end.cancel()
            flow.end = self._clock.at(self._clock.now_s + flow.left_nbytes / flow.rate, self._end, flow)

    def _settle(self, flow: Flow) -> None:
        now_s = self._clock.now_s
        flow.left_nbytes -= (now_s - flow.since_s) * flow.rate
        flow.since_s = now_s

    def _end(self, flow: Flow) -> None:
        flow.left_nbytes = 0.0
        flow.since_s = self._clock.now_s
        self._remove(flow)
        latency_s = self._latency_s + self._between(flow.source, flow.target).rtt_s
        flow.end = self._clock.at(self._clock.now_s + latency_s, flow.done)
