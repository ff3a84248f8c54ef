"""Splitwise (ISCA'24): clusters of equal cost, colocated and split, of one or two kinds of machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from moonpool.bench.paper.setup import PAPER, holds
from moonpool.conductor.costs.model import Profile
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.capacity import highest_speed
from moonpool.simulator.inputs.hardware import A100, H100, LLAMA3_70B, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest, at_speed
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

_COUNT = 1500
_WHOLE = 8192  # a step takes a whole prompt
# Quantile, and how many times as long as alone on a DGX-A100: the paper's limits.
_TTFT_LIMITS = {0.5: 2.0, 0.9: 3.0, 0.99: 6.0}
_OTHER_LIMITS = {0.5: 1.25, 0.9: 1.5, 0.99: 5.0}
_GAIN = 2.35
# Machines, 13 DGX-A100 or what costs as much: prefill, decode, both.
_CLUSTERS: Mapping[str, Sequence[tuple[int, int, int]]] = {
    "Baseline-A100": [(0, 0, 13)],
    "Baseline-H100": [(0, 0, 6)],
    "Splitwise-AA": [(7, 6, 0), (9, 4, 0), (11, 2, 0)],
    "Splitwise-HH": [(3, 3, 0), (4, 2, 0), (5, 1, 0)],
    "Splitwise-HA": [(3, 6, 0), (4, 4, 0), (5, 2, 0)],
}

TERMS = f"""\
The first {_COUNT:,} requests of the trace, without prefixes (give it the Azure code trace, the paper's).
Machines of eight GPUs with LLaMA3-70B (the paper: Llama2-70B, of the same shape); a DGX-H100 costs 38 an
hour, a DGX-A100 17.6, so that 6 cost what 13 do. Every cluster costs the same; the best ratio of those
tried stands for each kind. Most load: TTFT 2, 3 and 6 times (p50, p90, p99), TPOT and whole answers 1.25,
1.5 and 5 times as long as alone on a DGX-A100, all nine. The paper's abstract has {_GAIN:g} times the
throughput of its baselines at equal cost and equal power; ours are of equal cost alone, over Baseline-A100.
"""


def scenarios(name: str) -> Mapping[str, Scenario]:
    """The clusters of one kind, by their numbers of machines."""
    machines = {
        kind: replace(tensor_parallel(gpu, LLAMA3_70B, 8), chunk_tokens=_WHOLE)
        for kind, gpu in (("A", A100), ("H", H100))
    }
    kinds = name.partition("-")[2]
    found: dict[str, Scenario] = {}
    for prefill, decode, both in _CLUSTERS[name]:
        counts = f"{both} machines" if both else f"{prefill} prefill + {decode} decode machines"
        found[counts] = Scenario(
            machines[kinds[0]],
            num_prefill=prefill,
            num_decode=decode,
            num_both=both,
            decode_hardware=None if both else machines[kinds[1]],
        )
    return found


def measure(trace: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Return the most load of each kind of cluster, and what splitting gains."""
    plain = [replace(request, block_ids=()) for request in trace[:_COUNT]]
    alone = tensor_parallel(A100, LLAMA3_70B, 8).profile
    rates: dict[str, float] = {}
    rows: list[Row] = []
    for name in _CLUSTERS:
        best, best_counts = 0.0, "none"
        for counts, scenario in scenarios(name).items():

            def serves(speed: float, scenario: Scenario = scenario, text: str = f"{name}, {counts}") -> bool:
                say(f"{text} at {speed:.2f}× the speed")
                return in_time(Simulation(scenario, at_speed(plain, speed)).run(), alone)

            speed = highest_speed(serves)
            if speed > best:
                best, best_counts = speed, counts
        rates[name] = best * len(plain) / max(plain[-1].arrival_s, 1e-9)
        rows.append(Row(f"{name}: {best_counts}", "most load", rates[name], "requests/s"))
    split = max(rate for name, rate in rates.items() if name.startswith("Splitwise"))
    for name in ("Baseline-A100", "Baseline-H100"):
        if rates[name]:
            gain = Row("the best split cluster", f"over {name}", split / rates[name], "×")
            rows.append(versus(gain, PAPER, _GAIN) if name == "Baseline-A100" else gain)
    first = split > max(rates["Baseline-A100"], rates["Baseline-H100"])
    return [*rows, holds("all", "splitting serves the most", first)]


def in_time(outcome: Outcome, alone: Profile) -> bool:
    """Whether all quantiles of TTFT, TPOT and E2E are within the limits. ``alone``: an idle machine."""
    ratios: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
    for each in outcome.served:
        if each.rejected:
            return False
        ttft_s = alone.prefill_s(each.input_tokens, 0)
        step_s = alone.step_s(1, each.input_tokens + each.output_tokens // 2)
        ratios["ttft"].append(each.ttft_s / ttft_s)
        ratios["e2e"].append(each.e2e_s / (ttft_s + step_s * (each.output_tokens - 1)))
        if each.output_tokens > 1:
            ratios["tpot"].append(each.tpot_s / step_s)
    return all(
        np.quantile(values, quantile) <= limit
        for metric, values in ratios.items()
        for quantile, limit in (_TTFT_LIMITS if metric == "ttft" else _OTHER_LIMITS).items()
        if values
    )
