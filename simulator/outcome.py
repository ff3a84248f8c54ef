"""The figures of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.conductor.observing.slo import Slo
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.cluster.memory import NodeMemory

# The copies of this many most shared keys are counted.
_HOT_KEYS = 10


@dataclass(frozen=True, slots=True)
class Served:
    """One request. ``rejected``: the stage, empty for a served one. Rejected: no latencies."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    rejected: str = ""
    ttft_s: float = -1.0
    tpot_s: float = 0.0  # (last - first token) / (tokens - 1); 0: a single token
    tbt_s: float = 0.0  # mean of the longest tenth of the gaps between tokens; 0: a single token
    e2e_s: float = -1.0
    slo: Slo | None = None  # of its own
    tenant: str = ""

    def within(self, slo: Slo) -> bool:
        """``slo``: of requests without one of their own."""
        slo = self.slo or slo
        return not self.rejected and self.ttft_s <= slo.ttft_s and self.tbt_s <= slo.tbt_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures over all requests."""

    served: Sequence[Served]
    slo: Slo
    window_s: float  # from the first arrival to the last
    span_s: float  # from the first arrival to the last token
    hit_tokens: Counter[str]  # prompt tokens by source: pool, host, ssd, peer, computed
    block_tokens: int
    moved_nbytes: float
    egress: float  # money for those of them that crossed regions
    prefill_busy_s: float  # of GPUs
    decode_busy_s: float
    gpu_s: float  # of GPUs that were paid for in span_s
    node_s: float  # seconds that nodes were paid for, until the last token
    hot_copies: Sequence[int]  # the nodes that hold each of the most shared keys at the end
    num_copies: int  # of hot prefixes
    num_released: int  # of those

    @property
    def completed(self) -> list[Served]:
        return [each for each in self.served if not each.rejected]

    @property
    def num_within(self) -> int:
        """Requests served within both SLOs: their own, or the cluster's."""
        return sum(each.within(self.slo) for each in self.served)

    @property
    def effective_ratio(self) -> float:
        """Fraction of all requests served within both SLOs."""
        return self.num_within / len(self.served)

    @property
    def goodput(self) -> float:
        """Requests within both SLOs a second, over ``window_s``."""
        return self.num_within / self.window_s if self.window_s else float(self.num_within)

    @property
    def rejections(self) -> Counter[str]:
        """Rejected requests by stage."""
        return Counter(each.rejected for each in self.served if each.rejected)

    @property
    def mean_ttft_s(self) -> float:
        return float(np.mean([each.ttft_s for each in self.completed])) if self.completed else 0.0

    @property
    def busy_ratio(self) -> float:
        """Fraction of the GPU time in ``span_s`` in which steps ran."""
        return (self.prefill_busy_s + self.decode_busy_s) / self.gpu_s if self.gpu_s else 0.0

    @property
    def hit_ratio(self) -> float:
        """Fraction of the prompt tokens that were cached, in any tier."""
        total = sum(self.hit_tokens.values())
        return 1 - self.hit_tokens["computed"] / total if total else 0.0


def served(job: Job) -> Served:
    """Return the figures of a request that has ended."""
    request = job.request
    plain = (request.arrival_s, request.input_tokens, request.output_tokens, job.rejected)
    name = request.client.name
    if job.first_token_s < 0 or job.rejected:
        ttft_s = max(job.first_token_s - request.arrival_s, -1.0)
        return Served(*plain, ttft_s=ttft_s, slo=request.slo, tenant=name)
    gaps_s = np.concatenate(job.gaps_s) if job.gaps_s else np.empty(0)
    assert len(gaps_s) == request.output_tokens - 1, "a token was lost, or came twice"
    tpot_s = tbt_s = 0.0
    if len(gaps_s):
        tpot_s, tbt_s = float(gaps_s.mean()), longest_tenth_s(gaps_s)
    since_s = request.arrival_s - job.rtt_s
    times = job.first_token_s - since_s, tpot_s, tbt_s, job.done_s - since_s
    return Served(*plain, *times, request.slo, name)


def longest_tenth_s(gaps_s: npt.NDArray[np.float64]) -> float:
    """Return the mean of the longest tenth of a request's gaps between tokens, of one or more."""
    longest = -(-len(gaps_s) // 10)
    return float(np.partition(gaps_s, len(gaps_s) - longest)[-longest:].mean())


def hot_copies(jobs: Iterable[Job], memories: Iterable[NodeMemory]) -> list[int]:
    """Return the number of nodes that hold each of the most shared keys."""
    uses = Counter(key for job in jobs for key in job.keys)
    hottest = [key for key, count in uses.most_common(_HOT_KEYS) if count > 1]
    holding = list(memories)
    return [sum(memory.holds(key) for memory in holding) for key in hottest]
