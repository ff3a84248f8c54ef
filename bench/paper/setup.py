"""What figures share: the testbed of Mooncake's papers, and requests of published lengths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.reports.report import Row
from moonpool.simulator.inputs.hardware import SHIPPED, Hardware, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest

# KV cache of a node, as in figure 10.
CACHE_TOKENS = 3_000_000
SLO = Slo(ttft_s=30.0, tbt_s=0.1)
PAPER = "paper"


def decode_node() -> Hardware:
    """Return 8×A800 with LLaMA3-70B."""
    node = tensor_parallel(*SHIPPED["8xa800-llama3-70b"])
    return replace(node, host_tokens=0, chunk_tokens=8192)


def prefill_node() -> Hardware:
    """Return the same. Its pool is the cache: loading overlaps with computing."""
    return replace(decode_node(), pool_tokens=CACHE_TOKENS)


def scenario(policy: str, *, prefill: int, decode: int) -> Scenario:
    """Return a cluster in which only prefill nodes cache blocks, as in the paper's experiments."""
    return Scenario(
        hardware=prefill_node(),
        decode_hardware=decode_node(),
        num_prefill=prefill,
        num_decode=decode,
        policy=policy,
        slo=SLO,
        decode_caches=False,
    )


def holds(case: str, metric: str, found: bool) -> Row:
    """Return the row of a statement that must be true."""
    return Row(case, metric, float(found), "1: yes", limit="at least", limit_value=1.0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of tokens, where papers give medians or means alone: by its median and the
    deviation of its logarithm."""

    median: float
    deviation: float

    @classmethod
    def of_mean(cls, mean: float, deviation: float) -> Lengths:
        return cls(mean * math.exp(-(deviation**2) / 2), deviation)

    @classmethod
    def of_p90(cls, median: float, p90: float) -> Lengths:
        return cls(median, math.log(p90 / median) / 1.2816)

    def draw(self, rng: random.Random, most: int) -> int:
        return min(max(round(rng.lognormvariate(math.log(self.median), self.deviation)), 1), most)


def requests(
    count: int, prompt: Lengths, output: Lengths, *, most: int, block_tokens: int, seed: int
) -> list[TraceRequest]:
    """Return ``count`` requests without shared prefixes, a Poisson process of one a second.

    ``most``: tokens of a prompt, and of prompt and output together.
    """
    rng, at_s, next_id = random.Random(seed), 0.0, 0
    found: list[TraceRequest] = []
    for _ in range(count):
        num_input = prompt.draw(rng, most - 1)
        num_output = output.draw(rng, most - num_input)
        num_blocks = -(-num_input // block_tokens)
        found.append(TraceRequest(at_s, num_input, num_output, tuple(range(next_id, next_id + num_blocks))))
        next_id += num_blocks
        at_s += rng.expovariate(1.0)
    return found
