"""Simulated fleets, planned and fixed, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.plan import ADD, COOLDOWN_S, LEND_S, REMOVE, SWITCH, Bounds, Rules
from moonpool.simulator.cluster.elastic_fleet import Change, Shortage
from moonpool.simulator.inputs.hardware import Hardware
from moonpool.simulator.inputs.scenario import Elastic, Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

HOUR_S = 3600.0


@dataclass(frozen=True)
class Planned:
    """What the planner may do. ``target``: the fraction of requests that should keep the SLOs; ``join_s``:
    until a node that was asked for serves."""

    bounds: Mapping[str, Bounds]
    target: float
    hold_s: float
    join_s: float

    @property
    def rules(self) -> Rules:
        return Rules(
            self.bounds,
            attained=self.target,
            hold_s=self.hold_s,
            lend_s=min(LEND_S, self.hold_s),
            cooldown_s=min(COOLDOWN_S, self.hold_s),
            can=frozenset({ADD, REMOVE, SWITCH}),
        )


@dataclass(frozen=True)
class Task:
    """One simulation of ``prefill`` and ``decode`` nodes; with ``planned`` of that many at first.

    ``attained``: give up once fewer requests can be within the SLOs.
    """

    hardware: Hardware
    slo: Slo
    prefill: int
    decode: int
    migrate: Sequence[str] = ()
    planned: Planned | None = None
    attained: float = 0.0


@dataclass(frozen=True)
class Result:
    """What a fleet reached. ``attained``: fraction of requests within both SLOs."""

    attained: float
    node_hours: float
    span_s: float
    ttft_s: Sequence[float]  # p50, p90, p95, p99
    num_replaced: int = 0  # prompts that were placed again
    changes: Sequence[Change] = ()
    shortages: Sequence[Shortage] = ()
    history: Sequence[tuple[float, int, int]] = field(default=(), repr=False)


class Simulator:
    """Runs tasks on all cores. Use it with ``with``."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        cores = len(os.sched_getaffinity(0))
        self._pool = ProcessPoolExecutor(
            cores, multiprocessing.get_context("spawn"), initializer=_keep, initargs=(list(requests),)
        )

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: Iterable[Task]) -> Iterator[Result | None]:
        """The results, in order; None: fewer requests than ``attained`` keep the SLOs."""
        return self._pool.map(_simulate, tasks)


_requests: list[TraceRequest] = []


def _keep(requests: list[TraceRequest]) -> None:
    _requests[:] = requests


def _simulate(task: Task) -> Result | None:
    return simulate(task, _requests)


def simulate(task: Task, requests: Sequence[TraceRequest]) -> Result | None:
    """Run one task in this process."""
    planned = task.planned
    scenario = Scenario(
        task.hardware,
        num_prefill=task.prefill,
        num_decode=task.decode,
        slo=task.slo,
        migrate=task.migrate,
        elastic=Elastic(planned.rules, planned.join_s) if planned is not None else None,
    )
    simulation = Simulation(scenario, requests)
    outcome = simulation.run_while(task.attained)
    if outcome is None or outcome.effective_ratio < task.attained:
        return None
    fleet = simulation.fleet
    return Result(
        outcome.effective_ratio,
        outcome.node_s / HOUR_S,
        outcome.span_s,
        _ttft_s(outcome),
        simulation.moves.num_replaced,
        fleet.changes if fleet is not None else (),
        fleet.shortages.ended if fleet is not None else (),
        fleet.history if fleet is not None else (),
    )


def _ttft_s(outcome: Outcome) -> list[float]:
    ordered = sorted(each.ttft_s for each in outcome.completed) or [0.0]
    return [ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in (0.5, 0.9, 0.95, 0.99)]
