"""Planned fleets against the smallest fixed fleets that keep the SLOs as often."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moonpool.bench.elastic.fleets import HOUR_S, Planned, Result, Simulator, Task
from moonpool.bench.harness.turns import spread
from moonpool.conductor.planning.plan import ADD, REMOVE, SWITCH, Bounds
from moonpool.runtime.reports.report import Curve, Row
from moonpool.simulator.cluster.elastic_fleet import Change

_FLAP_S = 600.0


@dataclass(frozen=True)
class Case:
    """One planned fleet."""

    task: Task
    planned: Planned

    @property
    def name(self) -> str:
        ttft_s, planned = self.task.slo.ttft_s, self.planned
        return f"planned for {planned.target:g}, TTFT {ttft_s:g} s, hold {planned.hold_s:g} s"


class Comparison:
    """One run: ``rows`` simulates, ``curves`` draws what it found."""

    def __init__(
        self,
        simulator: Simulator,
        cases: Sequence[Case],
        most: Mapping[str, Bounds],
        say: Callable[[str], None],
    ) -> None:
        """``most``: the largest fixed fleet."""
        self._simulator = simulator
        self._cases = cases
        self._most = most
        self._say = say
        self._known: dict[tuple[float, int, int], tuple[float, Result | None]] = {}
        self._histories: dict[str, Sequence[tuple[float, int, int]]] = {}

    def rows(self) -> Iterator[Row]:
        self._say(f"{len(self._cases)} planned fleets")
        for case, planned in zip(
            self._cases, self._simulator.run(case.task for case in self._cases), strict=True
        ):
            assert planned is not None  # it has no least attainment
            self._say(f"{case.name}: {planned.attained:.2%} in {planned.node_hours:.2f} node-hours")
            self._histories[case.name] = planned.history
            yield from _figures(case.name, planned)
            yield from behaviour(case.name, case.planned.join_s, planned)
            yield from self._against_fixed(case, planned)

    def curves(self) -> list[Curve]:
        """The nodes that served over time."""
        return [
            Curve(
                f"nodes that serve, {name}", role, "s", "nodes", [(row[0], float(row[i])) for row in history]
            )
            for name, history in self._histories.items()
            for i, role in ((1, "prefill"), (2, "decode"))
        ]

    def _against_fixed(self, case: Case, planned: Result) -> Iterator[Row]:
        # Static at equal node-hours: as many nodes as were paid for on average, no fewer.
        count = math.ceil(planned.node_hours * HOUR_S / planned.span_s)
        decode = max(1, round(float(np.mean([row[2] for row in planned.history]))))
        if count > decode:
            (equal,) = self._fixed(case, [(count - decode, decode)], 0.0)
            assert equal is not None
            yield from _figures(f"{_name(case, count - decode, decode)} (equal node-hours)", equal)
        found = self._smallest(case, planned.attained)
        if found is None:
            yield Row(case.name, "no fixed fleet within the ceilings keeps the SLOs as often", 1.0, "fleets")
            return
        prefill, decode, fixed = found
        name = _name(case, prefill, decode)
        yield from _figures(f"{name} (equal attainment)", fixed)
        yield Row(
            case.name,
            "fewer node-hours at equal attainment",
            100 * (1 - planned.node_hours / fixed.node_hours),
            "%",
            peer=name,
            peer_value=fixed.node_hours,
        )

    def _smallest(self, case: Case, attained: float) -> tuple[int, int, Result] | None:
        """The fixed fleet with the fewest nodes that keeps the SLOs for ``attained`` of the requests."""
        best: tuple[int, int, Result] | None = None
        most = self._most
        for decode in range(1, most["decode"].most + 1):
            # More decode nodes are worth it only with fewer prefill nodes.
            high = most["prefill"].most if best is None else best[0] + best[1] - decode - 1
            found = self._least_prefill(case, decode, high, attained)
            if found is not None:
                best = (found[0], decode, found[1])
        return best

    def _least_prefill(
        self, case: Case, decode: int, high: int, attained: float
    ) -> tuple[int, Result] | None:
        """The fewest prefill nodes, at most ``high``, that suffice; as many are tried at once as there are
        cores."""
        low, best = 0, None
        if high < 1:
            return None
        (at_most,) = self._fixed(case, [(high, decode)], attained)
        if at_most is None:
            return None
        best = (high, at_most)
        while best[0] - low > 1:
            gap = best[0] - low
            tried = sorted({low + gap // 3 or low + 1, low + (2 * gap) // 3 or low + 1} - {low, best[0]})
            for prefill, result in zip(
                tried, self._fixed(case, [(n, decode) for n in tried], attained), strict=True
            ):
                if result is None:
                    low = max(low, prefill)
                elif prefill < best[0]:
                    best = (prefill, result)
        return best

    def _fixed(self, case: Case, sizes: Sequence[tuple[int, int]], attained: float) -> list[Result | None]:
        """Results of fixed fleets, prefill and decode nodes; None: fewer requests keep the SLOs."""
        ttft_s = case.task.slo.ttft_s
        tasks = []
        for prefill, decode in sizes:
            tried, known = self._known.get((ttft_s, prefill, decode), (math.inf, None))
            if known is None and attained < tried:
                tasks.append(
                    replace(case.task, planned=None, prefill=prefill, decode=decode, attained=attained)
                )
        for task, result in zip(tasks, self._simulator.run(tasks), strict=True):
            kept = f"{result.attained:.2%}" if result is not None else f"less than {attained:.2%}"
            self._say(f"{_name(case, task.prefill, task.decode)}: {kept}")
            self._known[ttft_s, task.prefill, task.decode] = (attained, result)
        found = [self._known[ttft_s, prefill, decode][1] for prefill, decode in sizes]
        return [one if one is not None and one.attained >= attained else None for one in found]


def _name(case: Case, prefill: int, decode: int) -> str:
    return f"fixed: {prefill} prefill + {decode} decode, TTFT {case.task.slo.ttft_s:g} s"


def _figures(name: str, result: Result) -> Iterator[Row]:
    p50, p90, p95, p99 = (1e3 * value for value in result.ttft_s)
    yield Row(name, "requests within both SLOs", 100 * result.attained, "%")
    yield Row(name, "node-hours", result.node_hours, "h")
    yield Row(name, "TTFT", p50, "ms", p50=p50, p90=p90, p95=p95, p99=p99)


def behaviour(name: str, join_s: float, planned: Result) -> Iterator[Row]:
    """How often a planned fleet changed, and how soon it had enough nodes. ``join_s``: that a node takes."""
    hours = planned.span_s / HOUR_S
    switches = sum(change.kind == SWITCH for change in planned.changes)
    yield Row(name, "role changes (switches)", switches / hours, "an hour")
    yield Row(name, "nodes added and removed", (len(planned.changes) - switches) / hours, "an hour")
    flaps = num_reversed(planned.changes, _FLAP_S)
    yield Row(name, "reversed within 10 minutes", flaps / hours, "an hour")
    # Until it serves, a node is paid for nothing: keeping one for that long would have cost as much.
    in_vain = num_reversed(planned.changes, join_s)
    yield Row(name, "removed and added within a join", in_vain / hours, "an hour")
    yield Row(name, "prompts placed again", planned.num_replaced / hours, "an hour")
    served = [row[1] + row[2] for row in planned.history]
    yield Row(name, "nodes that serve, fewest", float(min(served)), "nodes")
    yield Row(name, "nodes that serve, most", float(max(served)), "nodes")
    short_s = [one.ended_s - one.began_s for one in planned.shortages]
    if short_s:
        yield spread(name, "from a burst to enough nodes", short_s, "s")
        yield Row(name, "time with too few nodes", 100 * sum(short_s) / planned.span_s, "%")


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
