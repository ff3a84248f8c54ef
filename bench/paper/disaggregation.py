"""DistServe (OSDI'24): requests served per GPU with and without disaggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moonpool.bench.paper.setup import PAPER, Lengths, holds, requests
from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.capacity import EFFECTIVE, highest_speed
from moonpool.simulator.inputs.hardware import A100, OPT_13B, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest, at_speed
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

_COUNT, _BLOCK_TOKENS = 1500, 64
_MOST_TOKENS = 2048  # OPT's context
_SLO = Slo(ttft_s=0.25, tbt_s=0.1)
# A whole prompt in one step, as vLLM had it; chunks as of DeepSpeed-MII.
_WHOLE, _CHUNK = 2048, 512
_LEAST, _MOST = 2.0, 4.6  # DistServe over vLLM, the paper's three chatbots

TERMS = f"""\
OPT-13B on A100 GPUs, {_COUNT:,} generated requests with ShareGPT's mean lengths (755 + 200 tokens;
log-normal, deviation of the logarithm 0.6, at most {_MOST_TOKENS:,} together), Poisson arrivals. The most
load at which nine of ten requests have TTFT {_SLO.ttft_s:g} s and TPOT {_SLO.tbt_s:g} s, divided by the
GPUs: the paper's chatbot. vLLM: a replica of one GPU that takes a prompt in one step. DeepSpeed-MII: the
same in chunks of {_CHUNK}. DistServe: a prefill node of two GPUs and a decode node of one, as the paper
chose; KV crosses NVLink. The paper's gain over vLLM is {_LEAST:g} to {_MOST:g} times by model; the lower
one stands beside ours.
"""


def workload() -> list[TraceRequest]:
    prompt, output = Lengths.of_mean(755, 0.6), Lengths.of_mean(200, 0.6)
    return requests(_COUNT, prompt, output, most=_MOST_TOKENS, block_tokens=_BLOCK_TOKENS, seed=1)


def clusters() -> Mapping[str, Scenario]:
    one = replace(tensor_parallel(A100, OPT_13B, 1), network_nbytes_per_s=A100.peer_nbytes_per_s)
    two = replace(tensor_parallel(A100, OPT_13B, 2), network_nbytes_per_s=A100.peer_nbytes_per_s)

    def replica(chunk_tokens: int) -> Scenario:
        hardware = replace(one, chunk_tokens=chunk_tokens)
        return Scenario(
            hardware, num_prefill=0, num_decode=0, num_both=1, slo=_SLO, block_tokens=_BLOCK_TOKENS
        )

    return {
        "vLLM": replica(_WHOLE),
        "DeepSpeed-MII": replica(_CHUNK),
        "DistServe": Scenario(
            replace(two, chunk_tokens=_WHOLE),
            num_prefill=1,
            num_decode=1,
            decode_hardware=one,
            slo=_SLO,
            block_tokens=_BLOCK_TOKENS,
        ),
    }


def measure(trace: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Return the load per GPU of each system, and DistServe's gain over the others."""
    rates: dict[str, float] = {}
    for name, scenario in clusters().items():

        def serves(speed: float, name: str = name, scenario: Scenario = scenario) -> bool:
            say(f"{name} at {speed:.2f} requests/s")
            return _within(Simulation(scenario, at_speed(trace, speed)).run()) >= EFFECTIVE

        # The generated requests arrive one a second, so that the speed is the rate.
        rates[name] = highest_speed(serves) / scenario.num_gpus
    case = "chatbot, OPT-13B"
    rows = [Row(case, name, rate, "requests/s per GPU") for name, rate in rates.items()]
    for other in ("vLLM", "DeepSpeed-MII"):
        if rates[other]:
            gain = Row(case, f"DistServe over {other}", rates["DistServe"] / rates[other], "×")
            rows.append(versus(gain, PAPER, _LEAST) if other == "vLLM" else gain)
    first = rates["DistServe"] > max(rates["vLLM"], rates["DeepSpeed-MII"])
    return [*rows, holds(case, "DistServe serves the most", first)]


def _within(outcome: Outcome) -> float:
    """The part of the requests in time: the paper limits the mean of a request's gaps, not the longest."""
    in_time = (e.ttft_s <= _SLO.ttft_s and e.tpot_s <= _SLO.tbt_s for e in outcome.completed)
    return sum(in_time) / len(outcome.served)
