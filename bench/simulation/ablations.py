"""What the parts of the ``goodput`` policy are worth, and policies with wrong estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moonpool.bench.harness.turns import percentiles
from moonpool.conductor.placing.policies import Goodput, KvAware, Policy
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import Curve, Row, versus
from moonpool.simulator.inputs.errors import Errors
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


def _check_slo(option: str, scenario: Scenario) -> None:
    if not min(scenario.slo.ttft_s, scenario.slo.tbt_s) < math.inf:
        raise ConfigError(
            f"{option} counts requests within SLOs: give --slo-ttft or --slo-tbt", key="slo_ttft"
        )


def ablations(scenario: Scenario, requests: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Run ``requests`` with each of ``VARIANTS``. Goodput is compared with that of ``kv-aware``.

    Raises ``ConfigError`` without SLOs.
    """
    _check_slo("--ablations", scenario)
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


# As measured on two busy cores, the worst case known (docs/decisions/simulator.md): a standard deviation
# is the median of the absolute error over 0.67.
MEASURED = Errors(node=0.4, work=0.43, link=0.5, index_s=1e-3)
_SCALES = (0.0, 1.0, 2.0, 3.0)


def robustness(
    scenarios: Mapping[str, Scenario], requests: Sequence[TraceRequest], say: Callable[[str], None]
) -> tuple[list[Row], list[Curve]]:
    """Run each of ``scenarios`` (by policy) with errors of several scales.

    All policies meet the same nodes and links. Raises ``ConfigError`` without SLOs.
    """
    for scenario in scenarios.values():
        _check_slo("--robustness", scenario)
    found: list[Row] = []
    lines: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    without: dict[str, float] = {}
    for scale in _SCALES:
        case = f"errors × {scale:g}"
        for policy, scenario in scenarios.items():
            say(f"{case}: {policy}")
            outcome = Simulation(replace(scenario, errors=MEASURED.scaled(scale)), requests).run()
            row = Row(case, f"{policy}: goodput", outcome.goodput, "requests/s")
            if scale:
                row = versus(row, "without errors", without[policy])
            else:
                without[policy] = outcome.goodput
            found += [row, Row(case, f"{policy}: mean TTFT", outcome.mean_ttft_s, "s")]
            for panel, value, unit in (
                ("goodput", outcome.goodput, "requests/s within the SLOs"),
                ("mean TTFT", outcome.mean_ttft_s, "s"),
            ):
                lines.setdefault((panel, policy, unit), []).append((scale, value))
    x = "errors, × measured"
    return found, [Curve(panel, policy, x, unit, points) for (panel, policy, unit), points in lines.items()]
