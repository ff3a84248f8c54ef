"""What policies reach when the scheduler's estimates are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import Curve, Row, versus
from moonpool.simulator.inputs.errors import Errors
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.simulation import Simulation

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
    if not all(min(one.slo.ttft_s, one.slo.tbt_s) < math.inf for one in scenarios.values()):
        raise ConfigError(
            "--robustness counts requests within SLOs: give --slo-ttft or --slo-tbt", key="slo_ttft"
        )
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
