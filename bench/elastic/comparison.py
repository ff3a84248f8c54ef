"""A planned fleet against fixed ones in the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.plan import ADD, COOLDOWN_S, LEND_S, REMOVE, SWITCH, Bounds, Rules
from moonpool.runtime.reports.report import Curve, Row
from moonpool.simulator.cluster.elastic_fleet import Change, ElasticFleet
from moonpool.simulator.inputs.hardware import Hardware
from moonpool.simulator.inputs.scenario import Elastic, Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

_HOUR_S = 3600.0
_FLAP_S = 600.0


@dataclass(frozen=True)
class Fleet:
    """``bounds``: of the planned fleet, by role; ``join_s``: until a node that was asked for serves."""

    hardware: Hardware
    slo: Slo
    bounds: Mapping[str, Bounds]
    join_s: float
    hold_s: float


@dataclass(frozen=True)
class Fixed:
    """A fleet of always as many nodes, and what it reached."""

    prefill: int
    decode: int
    outcome: Outcome

    @property
    def name(self) -> str:
        return f"fixed: {self.prefill} prefill + {self.decode} decode"


class Comparison:
    """One run: ``rows`` simulates, ``curves`` draws what it found."""

    def __init__(self, fleet: Fleet, requests: Sequence[TraceRequest]) -> None:
        self._fleet = fleet
        self._requests = requests
        self._history: Sequence[tuple[float, int, int]] = ()

    def rows(self, say: Callable[[str], None]) -> Iterator[Row]:
        say(f"{len(self._requests):,} requests, planned")
        planned, fleet = self._planned()
        self._history = fleet.history
        hours = planned.node_s / _HOUR_S
        yield from _figures("planned", planned, hours)
        yield from _behaviour(fleet, planned.span_s, self._fleet.join_s)
        least, decodes = self._equal_hours(planned, fleet)
        say(f"fixed, of as many node-hours: {least} + {decodes}")
        equal = self._fixed(least, decodes)
        yield from _figures(f"{equal.name} (equal node-hours)", equal.outcome, _hours(equal))
        as_good = self._as_good(planned.effective_ratio, least, decodes, say)
        if as_good is None:
            yield Row("fixed", "no fixed fleet within the ceilings keeps the SLOs as often", 1.0, "fleets")
            return
        yield from _figures(f"{as_good.name} (equal attainment)", as_good.outcome, _hours(as_good))
        yield Row(
            "planned",
            "fewer node-hours at equal attainment",
            100 * (1 - hours / _hours(as_good)),
            "%",
            peer=as_good.name,
            peer_value=_hours(as_good),
        )

    def curves(self) -> list[Curve]:
        """The nodes that served over time."""
        return [
            Curve("nodes that serve", role, "s", "nodes", [(row[0], float(row[i])) for row in self._history])
            for i, role in ((1, "prefill"), (2, "decode"))
        ]

    def _planned(self) -> tuple[Outcome, ElasticFleet]:
        fleet = self._fleet
        rules = Rules(
            fleet.bounds,
            hold_s=fleet.hold_s,
            lend_s=min(LEND_S, fleet.hold_s),
            cooldown_s=min(COOLDOWN_S, fleet.hold_s),
            can=frozenset({ADD, REMOVE, SWITCH}),
        )
        simulation = Simulation(
            Scenario(
                fleet.hardware,
                num_prefill=fleet.bounds["prefill"].least,
                num_decode=fleet.bounds["decode"].least,
                slo=fleet.slo,
                elastic=Elastic(rules, fleet.join_s),
            ),
            self._requests,
        )
        outcome = simulation.run()
        assert simulation.fleet is not None
        return outcome, simulation.fleet

    def _fixed(self, prefill: int, decode: int) -> Fixed:
        scenario = Scenario(self._fleet.hardware, num_prefill=prefill, num_decode=decode, slo=self._fleet.slo)
        return Fixed(prefill, decode, Simulation(scenario, self._requests).run())

    def _equal_hours(self, planned: Outcome, fleet: ElasticFleet) -> tuple[int, int]:
        """The fixed fleet of at least as many node-hours, divided as the planned one was on average."""
        total = planned.node_s / planned.span_s
        serving = np.array(fleet.history)[:, 1:].mean(axis=0)
        decode = max(1, round(total * serving[1] / serving.sum()))
        return max(1, round(total - decode)), decode

    def _as_good(self, attained: float, low: int, decode: int, say: Callable[[str], None]) -> Fixed | None:
        """The smallest fixed fleet that keeps the SLOs for at least ``attained`` of the requests."""
        high = self._fleet.bounds["prefill"].most
        best = self._fixed(high, max(decode, self._fleet.bounds["decode"].least))
        if best.outcome.effective_ratio < attained:
            best = self._fixed(high, self._fleet.bounds["decode"].most)
            if best.outcome.effective_ratio < attained:
                return None
        low = 0
        while best.prefill - low > 1:
            middle = (best.prefill + low) // 2
            tried = self._fixed(middle, best.decode)
            say(f"{tried.name}: {tried.outcome.effective_ratio:.2%} of requests keep the SLOs")
            if tried.outcome.effective_ratio >= attained:
                best = tried
            else:
                low = middle
        return best


def _hours(fixed: Fixed) -> float:
    return fixed.outcome.node_s / _HOUR_S


def _figures(case: str, outcome: Outcome, hours: float) -> Iterator[Row]:
    ttft_ms = [1e3 * each.ttft_s for each in outcome.completed]
    yield Row(case, "requests within both SLOs", 100 * outcome.effective_ratio, "%")
    yield Row(case, "node-hours", hours, "h")
    yield Row(
        case,
        "TTFT",
        float(np.median(ttft_ms)),
        "ms",
        p95=float(np.quantile(ttft_ms, 0.95)),
        p99=float(np.quantile(ttft_ms, 0.99)),
    )


def _behaviour(fleet: ElasticFleet, span_s: float, join_s: float) -> Iterator[Row]:
    hours = span_s / _HOUR_S
    switches = sum(change.kind == SWITCH for change in fleet.changes)
    yield Row("planned", "role changes (switches)", switches / hours, "an hour")
    yield Row("planned", "nodes added and removed", (len(fleet.changes) - switches) / hours, "an hour")
    yield Row(
        "planned", "reversed within 10 minutes", num_reversed(fleet.changes, _FLAP_S) / hours, "an hour"
    )
    # Until it serves, a node is paid for nothing: keeping one for that long would have cost as much.
    in_vain = num_reversed(fleet.changes, join_s)
    yield Row("planned", "removed and added within a join", in_vain / hours, "an hour")
    served = np.array(fleet.history)[:, 1:].sum(axis=1)
    yield Row("planned", "nodes that serve, fewest", float(served.min()), "nodes")
    yield Row("planned", "nodes that serve, most", float(served.max()), "nodes")
    short_s = [one.ended_s - one.began_s for one in fleet.shortages]
    if short_s:
        yield Row(
            "planned",
            "from a burst to enough nodes",
            float(np.median(short_s)),
            "s",
            p95=float(np.quantile(short_s, 0.95)),
            p99=float(np.quantile(short_s, 0.99)),
        )
        yield Row("planned", "time with too few nodes", 100 * sum(short_s) / span_s, "%")


def num_reversed(changes: Sequence[Change], within_s: float) -> int:
    """Additions within ``within_s`` after a removal from the same role."""
    removed_s: dict[str, float] = {}
    count = 0
    for change in changes:
        if change.kind == REMOVE:
            removed_s[change.role] = change.at_s
        elif change.kind == ADD and change.at_s - removed_s.get(change.role, -math.inf) <= within_s:
            count += 1
    return count
