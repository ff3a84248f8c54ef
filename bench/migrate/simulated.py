"""Long outputs in the simulator: requests stay where they were placed, or move as the conductor decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from moonpool.bench.harness.command import Run
from moonpool.bench.migrate.tail_latency import MOVES, STAYS, beside_rows
from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.reports.report import Row
from moonpool.simulator.inputs.hardware import A800, LLAMA3_70B, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.inputs.workload import Workload
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

_CAUSES = {STAYS: ("drain",), MOVES: ("drain", "defragment", "hot-spot", "priority", "queue")}
# Prompts and answers of very different lengths, and decode nodes that are often full: without that placement
# by cost leaves nothing to move (tried: no move at all with eight times the room).
WORK = Workload(
    sessions=4000, rate=1.2, bursty=True, turns=1, prompt_tokens=4096, output_tokens=600, spread=1.0
)
_PREFILL, _DECODE, _POOL_TOKENS = 8, 4, 60_000
_TTFT_S, _TBT_S = 10.0, 0.1
HARDWARE = tensor_parallel(A800, LLAMA3_70B, 4)


def simulated_rows(run: Run) -> Iterator[Row]:
    work = replace(WORK, sessions=100) if run.quick else WORK
    run.machine = f"simulated {HARDWARE.name}"
    outcomes, simulation = run_both(work.requests(), run.say)
    case = (
        f"simulated, {_PREFILL} + {_DECODE} nodes, decode pools of {_POOL_TOKENS:,} tokens, "
        f"{work.sessions:,} requests in bursts of {work.prompt_tokens:,} + {work.output_tokens} tokens (mean)"
    )
    yield from beside_rows(case, {name: _figures(outcome) for name, outcome in outcomes.items()})
    for name, outcome in outcomes.items():
        yield Row(f"{name}: {case}", "requests within both SLOs", 100 * outcome.effective_ratio, "%")
    yield Row(f"{MOVES}: {case}", "moves of running requests", float(simulation.moves.num_moved), "moves")
    yield Row(f"{MOVES}: {case}", "prompts placed again", float(simulation.moves.num_replaced), "prompts")


def run_both(
    requests: Sequence[TraceRequest], say: Callable[[str], None]
) -> tuple[dict[str, Outcome], Simulation]:
    """Serve ``requests`` without and with moves; the simulation is the one with them."""
    outcomes: dict[str, Outcome] = {}
    for name, causes in _CAUSES.items():
        say(f"simulated: {name}")
        scenario = Scenario(
            HARDWARE,
            num_prefill=_PREFILL,
            num_decode=_DECODE,
            decode_hardware=replace(HARDWARE, pool_tokens=_POOL_TOKENS),
            slo=Slo(_TTFT_S, _TBT_S),
            migrate=causes,
        )
        simulation = Simulation(scenario, requests)
        outcomes[name] = simulation.run()
    return outcomes, simulation


def _figures(outcome: Outcome) -> dict[str, list[float]]:
    done = outcome.completed
    return {
        "TTFT": [each.ttft_s for each in done],
        "TBT, longest tenth of a request": [each.tbt_s for each in done if each.output_tokens > 1],
        "whole answer": [each.e2e_s for each in done],
    }
