"""What came of a simulation, as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.conductor.observing.slo import Slo
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.cluster.memory import NodeMemory

# Prefixes whose copies are counted: as many as there are hot ones in an hour of chat.
_HOT_KEYS = 10


@dataclass(frozen=True, slots=True)
class Served:
    """One request. ``rejected``: at which stage, empty where it was served; then latencies say nothing, but
    for a rejection before decode."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    rejected: str = ""
    ttft_s: float = -1.0
    tpot_s: float = 0.0  # (last - first token) / (tokens - 1); 0: a single token
    tbt_s: float = 0.0  # mean of the longest tenth of the gaps between tokens; 0: a single token
    e2e_s: float = -1.0

    def within(self, slo: Slo) -> bool:
        return not self.rejected and self.ttft_s <= slo.ttft_s and self.tbt_s <= slo.tbt_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures are over all requests; ``within`` counts for goodput."""

    served: Sequence[Served]
    slo: Slo
    window_s: float  # from the first arrival to the last
    span_s: float  # from the first arrival to the last token
    hit_tokens: Mapping[
        str, int
    ]  # prompt tokens by where their KV came from: pool, host, ssd, peer, computed
    block_tokens: int
    moved_nbytes: float
    prefill_busy_s: float  # of GPUs
    decode_busy_s: float
    num_gpus: int
    hot_copies: Sequence[int]  # of the most used keys: the nodes that hold them at the end
    num_copies: int  # of hot prefixes, made and let go again
    num_released: int
    num_events: int

    @property
    def completed(self) -> list[Served]:
        return [each for each in self.served if not each.rejected]

    @property
    def num_within(self) -> int:
        """Requests that were served within both SLOs."""
        return sum(each.within(self.slo) for each in self.served)

    @property
    def effective_ratio(self) -> float:
        """Of all requests that came."""
        return self.num_within / len(self.served)

    @property
    def goodput(self) -> float:
        """Requests within both SLOs a second of the time in which requests came."""
        return self.num_within / self.window_s if self.window_s else float(self.num_within)

    @property
    def rejections(self) -> Counter[str]:
        """By stage."""
        return Counter(each.rejected for each in self.served if each.rejected)

    @property
    def mean_ttft_s(self) -> float:
        return float(np.mean([each.ttft_s for each in self.completed])) if self.completed else 0.0

    @property
    def mean_tpot_s(self) -> float:
        times = [each.tpot_s for each in self.completed if each.output_tokens > 1]
        return float(np.mean(times)) if times else 0.0

    @property
    def busy_ratio(self) -> float:
        """Fraction of the GPU time until the last token in which steps ran."""
        available_s = self.num_gpus * self.span_s
        return (self.prefill_busy_s + self.decode_busy_s) / available_s if available_s else 0.0

    @property
    def hit_ratio(self) -> float:
        """Of the prompt tokens of requests that were computed, those whose KV was there, in any tier."""
        total = sum(self.hit_tokens.values())
        return 1 - self.hit_tokens["computed"] / total if total else 0.0


def served(job: Job) -> Served:
    """The figures of one request that has ended."""
    request = job.request
    plain = (request.arrival_s, request.input_tokens, request.output_tokens, job.rejected)
    if job.first_token_s < 0 or job.rejected:
        return Served(*plain, ttft_s=max(job.first_token_s - request.arrival_s, -1.0))
    gaps_s = np.concatenate(job.gaps_s) if job.gaps_s else np.empty(0)
    assert len(gaps_s) == request.output_tokens - 1, "a token was lost, or came twice"
    tpot_s = tbt_s = 0.0
    if len(gaps_s):
        tpot_s = float(gaps_s.mean())
        longest = -(-len(gaps_s) // 10)
        tbt_s = float(np.partition(gaps_s, len(gaps_s) - longest)[-longest:].mean())
    return Served(
        *plain, job.first_token_s - request.arrival_s, tpot_s, tbt_s, job.done_s - request.arrival_s
    )


def hot_copies(jobs: Iterable[Job], memories: Iterable[NodeMemory]) -> list[int]:
    """For each of the keys that most requests share: the number of nodes that hold it."""
    uses = Counter(key for job in jobs for key in job.keys)
    hottest = [key for key, count in uses.most_common(_HOT_KEYS) if count > 1]
    holding = list(memories)
    return [sum(memory.holds(key) for memory in holding) for key in hottest]
