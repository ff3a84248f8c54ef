"""S-LoRA (MLSys'24): throughput against the number of LoRA adapters of one base model on one GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from moonpool.bench.paper.setup import PAPER
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.hardware import A100, LLAMA_7B, Hardware, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.simulation import Simulation

_BLOCK_TOKENS, _POOL_TOKENS = 16, 125_000
_RATE, _SECONDS = 10.0, 120.0
_LENGTHS = (8, 511)  # tokens of prompts and of outputs
_RANK = 8
# Requests a second, from the authors' repository: benchmarks/paper, table 3's setting S1.
PAPER_THROUGHPUT = {5: 8.05, 100: 7.99, 1000: 7.64, 2000: 7.61}
PAPER_PEFT = {5: 0.88, 100: 0.25}

TERMS = f"""\
LLaMA-7B on one A100 of 80 GB with room for {_POOL_TOKENS:,} tokens of KV and adapters, as in the paper's
setting S1: rank {_RANK} for queries, keys, values and outputs of attention (16.8 MB an adapter), prompts and
outputs of {_LENGTHS[0]} to {_LENGTHS[1]} tokens, {_RATE:g} requests a second for {_SECONDS:g} s, each for any
adapter alike (the paper's power law with an exponent of 1). Throughput: requests over the time until the last
one has ended. An adapter is loaded from host memory at 25 GB/s, and each one in a step adds the time to read
it at the step's memory bandwidth. The paper's other systems were measured by its authors: PEFT serves one
adapter at a time, and merged copies of the model (vLLM-packed) are limited by memory.
"""


def workload() -> list[TraceRequest]:
    rng, at_s, next_id = random.Random(1), 0.0, 0
    found: list[TraceRequest] = []
    while True:
        at_s += rng.expovariate(_RATE)
        if at_s > _SECONDS:
            return found
        prompt, output = rng.randint(*_LENGTHS), rng.randint(*_LENGTHS)
        num_blocks = -(-prompt // _BLOCK_TOKENS)
        found.append(TraceRequest(at_s, prompt, output, tuple(range(next_id, next_id + num_blocks))))
        next_id += num_blocks


def gpu() -> Hardware:
    """Return the GPU, with the costs of an adapter."""
    hardware = tensor_parallel(A100, LLAMA_7B, 1)
    # Two matrices of ``_RANK`` rows for each of four projections of a layer, two bytes a weight.
    adapter_nbytes = LLAMA_7B.num_layers * 4 * 2 * LLAMA_7B.hidden_size * _RANK * 2
    bandwidth = LLAMA_7B.kv_token_nbytes / hardware.profile.decode_context_s
    return replace(
        hardware,
        pool_tokens=_POOL_TOKENS,
        host_tokens=0,
        adapter_nbytes=adapter_nbytes,
        adapter_step_s=adapter_nbytes / bandwidth,
    )


def with_adapters(requests: Sequence[TraceRequest], count: int) -> list[TraceRequest]:
    """Return the requests, each for one of ``count`` adapters, drawn alike."""
    rng = random.Random(count)
    return [replace(request, adapter=f"adapter-{rng.randrange(count)}") for request in requests]


def throughput(requests: Sequence[TraceRequest]) -> tuple[float, int]:
    """Requests a second until the last one has ended, and the adapters that were loaded."""
    scenario = Scenario(gpu(), 0, 0, 1, policy="kv-aware", block_tokens=_BLOCK_TOKENS)
    simulation = Simulation(scenario, requests)
    outcome = simulation.run()
    assert not outcome.rejections, "the pool holds every request"
    (node,) = simulation.nodes.values()
    return len(requests) / outcome.span_s, node.adapters.num_loads


def measure(trace: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Return the throughput with each number of adapters beside the paper's, and how flat it is."""
    rows: list[Row] = []
    found: dict[int, float] = {}
    for count, paper in PAPER_THROUGHPUT.items():
        say(f"{count:,} adapters")
        found[count], num_loads = throughput(with_adapters(trace, count))
        case = f"{count:,} adapters"
        rows.append(versus(Row(case, "throughput", found[count], "requests/s"), PAPER, paper))
        rows.append(Row(case, "loads", num_loads, "adapters"))
        if count in PAPER_PEFT:
            gain = Row(case, "over the paper's PEFT", found[count] / PAPER_PEFT[count], "×")
            rows.append(versus(gain, PAPER, paper / PAPER_PEFT[count]))
    least, most = min(found), max(found)
    flat = Row(f"{most:,} over {least} adapters", "throughput", found[most] / found[least], "×")
    rows.append(versus(flat, PAPER, PAPER_THROUGHPUT[most] / PAPER_THROUGHPUT[least]))
    copies = A100.memory_nbytes // LLAMA_7B.weight_nbytes
    rows.append(Row("merged copies of the model", "fit the memory, without KV", copies, "adapters"))
    return rows
