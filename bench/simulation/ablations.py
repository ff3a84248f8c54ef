"""What the parts of the ``goodput`` policy are worth, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moonpool.bench.harness.turns import percentiles
from moonpool.conductor.placing.policies import Goodput, KvAware, Policy
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.simulation import Simulation


@dataclass(frozen=True)
class _WithoutSlack(Goodput):
    """Late prefills keep their turn, as if there were no SLO."""

    def patience_s(self, compute_s: float, late: bool = False) -> float:
        return super().patience_s(compute_s)


@dataclass(frozen=True)
class _PatientKvAware(KvAware):
    """Algorithm 1's choice of nodes, with the queue order of ``goodput``."""

    order: Goodput = Goodput()

    def patience_s(self, compute_s: float, late: bool = False) -> float:
        return self.order.patience_s(compute_s, late)


_BASE = "kv-aware"
# The choice of nodes is one part, the order of the queue the other.
VARIANTS: Mapping[str, Policy] = {
    _BASE: KvAware(),
    "kv-aware, with goodput's order": _PatientKvAware(),
    "goodput, first come, first served": Goodput(patience=0.0, late_patience_s=0.0),
    "goodput, late ones in turn": _WithoutSlack(),
    "goodput": Goodput(),
}


def ablations(scenario: Scenario, requests: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Run ``requests`` with each of ``VARIANTS``. Goodput is compared with that of ``kv-aware``.

    Raises ``ConfigError`` without SLOs.
    """
    if not min(scenario.slo.ttft_s, scenario.slo.tbt_s) < math.inf:
        raise ConfigError(
            "--ablations counts requests within SLOs: give --slo-ttft or --slo-tbt", key="slo_ttft"
        )
    found: list[Row] = []
    base = 0.0
    for name, policy in VARIANTS.items():
        say(name)
        outcome = Simulation(replace(scenario, chooser=policy), requests).run()
        goodput = Row(name, "goodput", outcome.goodput, "requests/s")
        if name == _BASE:
            base = outcome.goodput
        else:
            goodput = versus(goodput, _BASE, base)
        found += [goodput, Row(name, "within the SLOs", 100 * outcome.effective_ratio, "% of requests")]
        if first_s := [each.ttft_s for each in outcome.completed]:
            found.append(Row(name, "TTFT", outcome.mean_ttft_s, "s, mean", **percentiles(first_s, 1.0)))
    return found
