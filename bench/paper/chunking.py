"""Sarathi-Serve (OSDI'24): gaps between tokens, and load, with prompts in chunks and in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from moonpool.bench.paper.setup import PAPER, Lengths, holds, requests
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.capacity import highest_speed
from moonpool.simulator.inputs.hardware import A100, MISTRAL_7B, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest, at_speed
from moonpool.simulator.simulation import Simulation

_COUNT, _BLOCK_TOKENS = 800, 64
_MOST_TOKENS = 8192
_CHUNK, _MOST_BATCH = 512, 128
_TBT_S, _TTFT_S = 0.1, 2.0
_GAIN = 2.6
_FORMS = {"whole prompts": _MOST_TOKENS, f"chunks of {_CHUNK}": _CHUNK}

TERMS = f"""\
A replica of Mistral-7B on one A100, {_COUNT} generated requests with the medians and 90th percentiles of
openchat_sharegpt4 (1,730 and 5,696 tokens of prompt, 415 and 834 of output; at most {_MOST_TOKENS:,}
together), Poisson arrivals. Most load: the 99th percentile of all gaps between tokens is at most {_TBT_S:g}
s and the median TTFT at most {_TTFT_S:g} s (the paper: the median wait before the first step). The paper's
gain of {_GAIN:g} is over vLLM, which takes a prompt in one step and pauses the batch for it; here the batch
takes part in that step.
"""


def workload() -> list[TraceRequest]:
    prompt, output = Lengths.of_p90(1730, 5696), Lengths.of_p90(415, 834)
    return requests(_COUNT, prompt, output, most=_MOST_TOKENS, block_tokens=_BLOCK_TOKENS, seed=1)


def replica(chunk_tokens: int) -> Scenario:
    hardware = tensor_parallel(A100, MISTRAL_7B, 1)
    hardware = replace(hardware, chunk_tokens=chunk_tokens, max_batch_size=_MOST_BATCH)
    return Scenario(hardware, num_prefill=0, num_decode=0, num_both=1, block_tokens=_BLOCK_TOKENS)


def measure(trace: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Return the most load in both forms, and the gaps of both at the load of the slower one."""
    speeds: dict[str, float] = {}
    for name, chunk_tokens in _FORMS.items():

        def serves(speed: float, name: str = name, chunk_tokens: int = chunk_tokens) -> bool:
            say(f"{name} at {speed:.2f} requests/s")
            gap_s, ttft_s = gaps(trace, chunk_tokens, speed)
            return gap_s <= _TBT_S and ttft_s <= _TTFT_S

        speeds[name] = highest_speed(serves)
    whole, chunked = _FORMS
    case = "Mistral-7B, one A100"
    rows = [Row(case, f"{name}: most load", speed, "requests/s") for name, speed in speeds.items()]
    if speeds[whole]:
        rows.append(versus(Row(case, "gain", speeds[chunked] / speeds[whole], "×"), PAPER, _GAIN))
    same = f"{case}, {speeds[chunked]:.3g} requests/s"
    tails = {name: gaps(trace, tokens, speeds[chunked]) for name, tokens in _FORMS.items()}
    for name, (gap_s, ttft_s) in tails.items():
        rows.append(Row(same, f"{name}: gaps between tokens, p99", 1e3 * gap_s, "ms"))
        rows.append(Row(same, f"{name}: TTFT, median", 1e3 * ttft_s, "ms"))
    return [*rows, holds(same, "chunks shorten the tail", tails[chunked][0] < tails[whole][0])]


def gaps(trace: Sequence[TraceRequest], chunk_tokens: int, speed: float) -> tuple[float, float]:
    """The 99th percentile of all gaps between tokens, and the median TTFT, in seconds."""
    simulation = Simulation(replica(chunk_tokens), at_speed(trace, speed))
    outcome = simulation.run()
    every = np.concatenate([gaps_s for job in simulation.jobs for gaps_s in job.gaps_s])
    first_s = [each.ttft_s for each in outcome.completed]
    return float(np.quantile(every, 0.99)), float(np.median(first_s))
