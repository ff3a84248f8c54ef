"""A plan checked by simulation: a part of the cluster, on generated arrivals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moonpool.conductor.observing.slo import Slo
from moonpool.simulator.inputs.hardware import Hardware
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.outcome import Outcome, Served
from moonpool.simulator.simulation import Simulation
from moonpool.simulator.sizing.search import Plan, evaluate
from moonpool.simulator.sizing.stages import Stage
from moonpool.simulator.sizing.traffic import Limits, Traffic

# One policy for prefill and decode nodes and for replicas.
POLICY = "goodput"
# A run lasts this many answers, within these numbers of requests.
_ANSWERS, _LEAST, _MOST = 10, 600, 1500
# For nodes nearer to the plan's ratio than this (as a logarithm), a run may be so many times as long.
_NEAR, _LONGER = 0.2, 3
# Requests that arrive in this part of the run count: before, batches still fill; after, they empty.
_FROM, _UNTIL = 0.4, 0.95
# The part's capacity in the simulation is bisected between these multiples of that by formula.
_SLOWEST, _FASTEST, _HALVINGS = 0.6, 1.4, 3


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes in about the plan's ratio, with the most load that the formulas give them within the limits."""

    plan: Plan
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of the simulated requests that count."""

    ttft_p99_s: float
    tbt_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float

    def keep(self, limits: Limits) -> bool:
        return limits.kept(self.ttft_p99_s, self.tbt_p99_s, self.e2e_p99_s)


@dataclass(frozen=True, slots=True)
class Check:
    """``simulated``: at the load of ``part``, the most by formula.

    ``simulated_rate``: the most requests a second within the limits, bisected to 7 %; 0: under 0.6 of the
    formulas'.
    """

    part: Part
    simulated: Latencies
    simulated_rate: float

    @property
    def scale(self) -> float:
        """Times the nodes of the formulas that the simulation asks for."""
        return self.part.traffic.rate / self.simulated_rate if self.simulated_rate else math.inf

    def num_gpus(self, plan: Plan) -> int:
        """GPUs of ``plan`` after the simulation; whole nodes of each stage. Needs a finite ``scale``."""
        stages = [stage for stage in (plan.prefill, plan.decode) if stage is not None]
        return sum(math.ceil(stage.num_nodes * self.scale - 1e-9) * stage.kind.num_gpus for stage in stages)


def check(plan: Plan, traffic: Traffic, limits: Limits, seed: int, say: Callable[[str], None]) -> Check:
    """Simulate a part of ``plan``'s cluster, and find the most load within the limits there."""
    part = part_of(plan, traffic, limits)

    def latencies(factor: float) -> Latencies:
        say(f"{part.plan.name}, {factor * part.traffic.rate:.3g} requests/s")
        return simulate(part.plan, part.traffic.times(factor), limits, seed)

    here = latencies(1.0)
    low, high = (1.0, _FASTEST) if here.keep(limits) else (_SLOWEST, 1.0)
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if latencies(middle).keep(limits):
            low = middle
        else:
            high = middle
    if low == _SLOWEST and not latencies(low).keep(limits):
        low = 0.0
    return Check(part, here, low * part.traffic.rate)


def part_of(plan: Plan, traffic: Traffic, limits: Limits) -> Part:
    """Choose the numbers of nodes nearest to the plan's ratio that a short run can fill."""
    nodes, others = plan.prefill.num_nodes, plan.decode.num_nodes if plan.decode else 0
    requests = traffic.rate * _ANSWERS * plan.e2e.mean_s
    best, best_off = (nodes, others), math.inf
    for count in range(1, nodes + 1) if requests > _MOST else ():
        other = max(round(count * others / nodes), 1) if others else 0
        fraction = min(count / nodes, other / others if others else 1.0)
        if best_off < math.inf and fraction * requests > _MOST * (1 if best_off < _NEAR else _LONGER):
            break
        off = abs(math.log(count * others / (other * nodes))) if others else 0.0
        if max(off, _NEAR / 4) <= max(best_off, _NEAR / 4):
            best, best_off = (count, other), off
    prefill = replace(plan.prefill, num_nodes=best[0])
    decode = replace(plan.decode, num_nodes=best[1]) if plan.decode else None
    low, high = 0.0, traffic.rate * 2
    found: Plan | None = None
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        made = evaluate(prefill, decode, replace(traffic, rate=middle))
        if made is not None and made.keeps(limits):
            found, low = made, middle
        else:
            high = middle
    assert found is not None, "limits that an idle node keeps"
    return Part(found, replace(traffic, rate=low))


def simulate(plan: Plan, traffic: Traffic, limits: Limits, seed: int) -> Latencies:
    """Run the plan's nodes on the traffic; equal arguments give equal latencies."""
    count = int(min(max(traffic.rate * _ANSWERS * plan.e2e.mean_s, _LEAST), _LONGER * _MOST))
    outcome = Simulation(_scenario(plan, limits, traffic.block_tokens), traffic.requests(count, seed)).run()
    counted = _counted(outcome)
    e2e = [each.e2e_s for each in counted]
    return Latencies(
        float(np.quantile([each.ttft_s for each in counted], 0.99)),
        float(np.quantile([each.tbt_s for each in counted], 0.99)),
        float(np.mean(e2e)),
        float(np.quantile(e2e, 0.99)),
    )


def _counted(outcome: Outcome) -> list[Served]:
    served = outcome.served
    return list(served[int(_FROM * len(served)) : int(_UNTIL * len(served))])


def _scenario(plan: Plan, limits: Limits, block_tokens: int) -> Scenario:
    prefill, decode = plan.prefill, plan.decode
    return Scenario(
        hardware=_hardware(prefill),
        num_prefill=prefill.num_lanes if decode else 0,
        num_decode=decode.num_lanes if decode else 0,
        num_both=0 if decode else prefill.num_lanes,
        decode_hardware=_hardware(decode) if decode else None,
        policy=POLICY,
        slo=Slo(min(limits.ttft_s, limits.e2e_s), limits.tbt_s),
        block_tokens=block_tokens,
    )


def _hardware(stage: Stage) -> Hardware:
    return replace(stage.kind.lane, chunk_tokens=stage.chunk_tokens)
