"""Requests with the lengths of a published data set, where the papers give medians or means alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from moonpool.simulator.inputs.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of tokens, by its median and the deviation of its logarithm."""

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
