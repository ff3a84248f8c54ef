"""Generated workloads: sessions with shared system prompts, turns and tool calls."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice

from moonpool.conductor.admission.tenants import LEAST_WEIGHT, Tenant
from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.trace import TraceRequest

# In a burst, sessions arrive this many times as fast as on average; a pause follows.
_BURST = 8.0
_BURST_S = 5.0
_LEAST = {
    1: ("sessions", "prompt_tokens", "output_tokens", "turn_tokens", "system_prompts", "turns"),
    0: (
        "system_tokens", "spread", "think_s", "tool_share", "tool_calls", "tool_s", "token_s", "slo_ttft",
        "slo_tbt", "max_requests", "tokens_per_minute",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """``sessions`` conversations of ``turns`` requests on average.

    Lengths are in tokens, means of a log-normal distribution; ``spread`` is the standard deviation of the
    logarithm (0: always the mean).
    """

    sessions: int = 500
    rate: float = 1.0  # sessions a second
    bursty: bool = False  # 5 s of eight times the rate, then a pause
    system_prompts: int = 4  # number of different ones; popularity by Zipf
    system_tokens: int = 1024  # of each; 0: none
    prompt_tokens: int = 2048  # of a session's first request, after the system prompt
    turn_tokens: int = 256  # added by each later request, after the answer before it
    output_tokens: int = 256
    spread: float = 0.8
    turns: float = 3.0  # geometric
    think_s: float = 20.0  # between an answer and the next turn, exponential
    tool_share: float = 0.0  # fraction of turns that make ``tool_calls`` more requests at once
    tool_calls: int = 3
    tool_s: float = 0.5  # duration of a call
    token_s: float = 0.02  # assumed duration of an output token, for the time of the next turn
    slo_ttft: float = 0.0  # seconds; of its requests. Both 0: as the cluster's, one of them 0: none
    slo_tbt: float = 0.0
    tenant: str = ""  # of all its requests, with this weight and these limits; 0: none
    weight: float = 1.0
    max_requests: int = 0
    tokens_per_minute: int = 0
    block_tokens: int = 512
    seed: int = 1

    def __post_init__(self) -> None:
        for least, names in _LEAST.items():
            for name in names:
                if not getattr(self, name) >= least:
                    text = f"a workload's {name} must be {least} or more, got {getattr(self, name)}"
                    raise ConfigError(text, key=name)
        if not self.rate > 0:
            raise ConfigError(f"a workload's rate must be above 0, got {self.rate}", key="rate")
        if not self.weight >= LEAST_WEIGHT:
            raise ConfigError(f"a workload's weight must be above 0, got {self.weight}", key="weight")
        if not self.tenant and (self.weight != 1.0 or self.max_requests or self.tokens_per_minute):
            raise ConfigError("a weight and limits are of a tenant: give tenant=NAME, too", key="tenant")
        if self.tool_share > 1:
            raise ConfigError(
                f"a workload's tool_share is at most 1, got {self.tool_share}", key="tool_share"
            )

    def requests(self) -> list[TraceRequest]:
        """Return the requests in order of arrival; equal workloads give equal requests."""
        rng = random.Random(self.seed)
        ids = count()  # of blocks: equal ids for equal prefixes
        systems: dict[int, list[int]] = {}
        found: list[TraceRequest] = []
        for arrival_s in self._arrivals(rng):
            found += self._session(rng, arrival_s, ids, systems)
        if self.slo_ttft or self.slo_tbt:
            slo = Slo.of_limits(self.slo_ttft, self.slo_tbt)
            found = [replace(request, slo=slo) for request in found]
        if self.tenant:
            client = Tenant(self.tenant, self.weight, self.max_requests, self.tokens_per_minute)
            found = [replace(request, client=client) for request in found]
        return sorted(found, key=lambda request: request.arrival_s)

    def _arrivals(self, rng: random.Random) -> Iterator[float]:
        now_s = 0.0
        for _ in range(self.sessions):
            yield now_s
            if not self.bursty:
                now_s += rng.expovariate(self.rate)
                continue
            busy_s = rng.expovariate(self.rate * _BURST)
            # The pause after a burst brings the mean back to the rate.
            bursts = math.floor((now_s % (_BURST_S * _BURST) + busy_s) / _BURST_S)
            now_s += busy_s + bursts * _BURST_S * (_BURST - 1)

    def _session(
        self, rng: random.Random, arrival_s: float, ids: Iterator[int], systems: dict[int, list[int]]
    ) -> Iterator[TraceRequest]:
        """``systems``: block ids of each system prompt used so far."""
        system = _zipf(rng, self.system_prompts)
        if system not in systems:
            systems[system] = list(islice(ids, self.system_tokens // self.block_tokens))
        chain = _Chain(ids, systems[system], self.system_tokens, self.block_tokens)
        chain.add(self._length(rng, self.prompt_tokens))
        now_s = arrival_s
        while True:
            calls = self.tool_calls if rng.random() < self.tool_share else 0
            for call in range(calls + 1):
                if call:
                    chain.add(self._length(rng, self.turn_tokens))
                output = self._length(rng, self.output_tokens)
                yield TraceRequest(now_s, chain.num_tokens, output, chain.block_ids())
                chain.add(output)
                now_s += output * self.token_s + (self.tool_s if call < calls else 0.0)
            if rng.random() < 1 / self.turns:
                return
            now_s += rng.expovariate(1 / self.think_s) if self.think_s else 0.0
            chain.add(self._length(rng, self.turn_tokens))

    def _length(self, rng: random.Random, mean: int) -> int:
        if not self.spread:
            return mean
        return max(1, round(rng.lognormvariate(math.log(mean) - self.spread**2 / 2, self.spread)))


def _zipf(rng: random.Random, size: int) -> int:
    return rng.choices(range(size), [1 / (rank + 1) for rank in range(size)])[0]


class _Chain:
    """A growing prompt. Its partial last block gets a new id in each request."""

    def __init__(self, ids: Iterator[int], full: list[int], num_tokens: int, block_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._ids = ids
        self._full = list(full)
        self._block_tokens = block_tokens

    def add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._full += islice(self._ids, self.num_tokens // self._block_tokens - len(self._full))

    def block_ids(self) -> tuple[int, ...]:
        partial = self.num_tokens % self._block_tokens > 0
        return (*self._full, *islice(self._ids, int(partial)))
