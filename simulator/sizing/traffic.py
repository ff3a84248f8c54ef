"""What a cluster is sized for: a workload of equal requests, and the limits of their latencies."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.inputs.workload import Workload

# A prompt has about this many blocks, of a power of two of tokens within these bounds.
_BLOCKS, _LEAST_BLOCK, _MOST_BLOCK = 8, 16, 512


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of equal lengths that arrive by a Poisson process."""

    rate: float  # requests a second
    prompt_tokens: int
    output_tokens: int
    hit: float = 0.0  # fraction of the prompt that is cached: one prefix that all requests begin with

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"--rate must be above 0 requests a second, got {self.rate:g}", key="rate")
        if self.prompt_tokens < 1 or self.output_tokens < 2:
            raise ConfigError(
                f"--prompt must be 1 token or more and --output 2 or more, got {self.prompt_tokens} and "
                f"{self.output_tokens}",
                key="prompt",
            )
        if not 0 <= self.hit < 1:
            raise ConfigError(
                f"--hit must be from 0 to below 1 (the last token is always computed), got {self.hit:g}",
                key="hit",
            )

    @property
    def cached_tokens(self) -> int:
        """In full blocks."""
        size = self.block_tokens
        return int(self.hit * self.prompt_tokens) // size * size

    @property
    def block_tokens(self) -> int:
        size = 1 << (max(self.prompt_tokens // _BLOCKS, 1).bit_length() - 1)
        return min(max(size, _LEAST_BLOCK), _MOST_BLOCK)

    def in_blocks(self, num_tokens: int) -> int:
        """Tokens of the blocks that hold so many."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def gaps(self) -> int:
        """Decode steps of a request; the prefill gives its first token."""
        return self.output_tokens - 1

    @property
    def context_tokens(self) -> float:
        """Tokens that a decode step attends to in one sequence, on average."""
        return self.prompt_tokens + self.output_tokens / 2

    def times(self, factor: float) -> Traffic:
        return replace(self, rate=self.rate * factor)

    def requests(self, count: int, seed: int) -> list[TraceRequest]:
        """Generate arrivals; equal arguments give equal requests."""
        return Workload(
            sessions=count,
            rate=self.rate,
            system_prompts=1,
            system_tokens=self.cached_tokens,
            prompt_tokens=self.computed_tokens,
            output_tokens=self.output_tokens,
            spread=0.0,
            turns=1.0,
            block_tokens=self.block_tokens,
            seed=seed,
        ).requests()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds that 99 of 100 requests keep; infinite: none."""

    ttft_s: float = math.inf
    tbt_s: float = math.inf
    e2e_s: float = math.inf

    def __post_init__(self) -> None:
        for name, value in (("slo-ttft", self.ttft_s), ("slo-tbt", self.tbt_s), ("e2e-p99", self.e2e_s)):
            if not value > 0:
                raise ConfigError(f"--{name} must be above 0 s, got {value:g}", key=name.replace("-", "_"))

    def answer_s(self, gaps: int) -> float:
        """The longest answer that they allow."""
        return min(self.e2e_s, self.ttft_s + gaps * self.tbt_s)

    def kept(self, ttft_s: float, tbt_s: float, e2e_s: float) -> bool:
        return ttft_s <= self.ttft_s and tbt_s <= self.tbt_s and e2e_s <= self.e2e_s
