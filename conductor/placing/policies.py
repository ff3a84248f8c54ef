"""Placement policies by name: each chooses among the estimates that ``place`` computed.

``local-cache`` and ``kv-aware`` are those of the Mooncake paper (Qin et al., FAST'25: cache-aware prefill
scheduling and its Algorithm 1), ``goodput`` is Moonpool's own. All are pure, and serve live and simulated
requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView
from moonpool.conductor.placing.placement import DecodeEstimate, PrefillEstimate, Reason

PrefillChoice = tuple[PrefillEstimate, Reason]


class Policy(ABC):
    """Chooses among candidates, which are never empty and must not be changed.

    The defaults: first come, first served, nothing fetched, decode by load.
    """

    name: ClassVar[str]
    fetches: ClassVar[bool] = False  # whether a prefix may be read from another node
    counts_cache: ClassVar[bool] = False  # False: the shortlist of a large fleet goes by queues alone
    least_gain_s: float = 0.0
    weighs_paths: ClassVar[bool] = False  # whether to compare two nodes with one; False: one where possible
    counts_load: ClassVar[bool] = True  # False: load that others add does not change a choice

    def first(self, view: ClusterView, count: int) -> int | None:
        """The position to begin at among ``count`` nodes; None: choose by estimates."""
        return None

    def takes(self, local_blocks: int, remote_blocks: int, fetched_s: float, local_s: float) -> bool:
        """Whether a node with ``local_blocks`` fetches ``remote_blocks``: TTFT with a fetch, its price
        included, and without."""
        return False

    def patience_s(self, compute_s: float, late: bool = False) -> float:
        """Prefills that arrive within this time may overtake one that computes for ``compute_s``.

        ``late``: its first token would come too late for the SLO even so.
        """
        return 0.0

    def slack_s(self, slo: Slo, usual: Slo) -> float:
        """As ``patience_s``, for a request with an SLO of its own; negative: it overtakes those that came
        before it by so much. ``usual``: the cluster's SLO."""
        return 0.0

    @abstractmethod
    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo
    ) -> PrefillChoice: ...

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView, slo: Slo) -> DecodeEstimate:
        return min(candidates, key=lambda c: (c.wait_s, c.step_s, c.num_placed, c.node_id))

    def computes_rest(self, prefill: PrefillEstimate, decode: DecodeEstimate) -> bool:
        """Whether a decode node may compute what ``prefill`` says, on that node itself."""
        return False

    def cost_s(self, prefill: PrefillEstimate, decode: DecodeEstimate) -> float:
        """What one way to serve a request costs all requests together."""
        delays_s = prefill.num_delayed * prefill.compute_s + prefill.delay_s + decode.delay_s
        return prefill.ttft_s + decode.total_s + delays_s + prefill.egress_s + decode.egress_s


class Random(Policy):
    """A random node."""

    name = "random"
    counts_load = False

    def first(self, view: ClusterView, count: int) -> int | None:
        return int(view.draw * count)

    def prefill(self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo) -> PrefillChoice:
        return candidates[0], Reason.CHANCE

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView, slo: Slo) -> DecodeEstimate:
        # The digits of the draw that the first choice did not use.
        return candidates[int(view.draw * 4096 % 1.0 * len(candidates))]


class RoundRobin(Policy):
    """Each node in turn."""

    name = "round-robin"
    counts_load = False

    def first(self, view: ClusterView, count: int) -> int | None:
        return view.turn % count

    def prefill(self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo) -> PrefillChoice:
        return candidates[0], Reason.TURN

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView, slo: Slo) -> DecodeEstimate:
        # The quotient shifts the pairing, so that each prefill node works with every decode node.
        turn = view.turn + view.turn // len(candidates)
        return candidates[turn % len(candidates)]


class LeastLoaded(Policy):
    """The shortest queue, whatever is cached."""

    name = "least-loaded"

    def prefill(self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo) -> PrefillChoice:
        return min(candidates, key=lambda c: (c.queue_s, c.num_placed, c.node_id)), Reason.LOAD


class LocalCache(Policy):
    """The earliest first token where each node uses only its own cache."""

    name = "local-cache"
    counts_cache = True

    def prefill(self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo) -> PrefillChoice:
        chosen = min(candidates, key=lambda c: (c.ttft_s, c.num_placed, c.node_id))
        return chosen, _reason(chosen, candidates)


@dataclass(frozen=True)
class KvAware(LocalCache):
    """The earliest first token where a prefix may be fetched: Mooncake's Algorithm 1."""

    name = "kv-aware"
    fetches = True
    # kvcache_balancing_threshold: fetch when the longest prefix is this many times the node's own.
    threshold: float = 1.0

    def takes(self, local_blocks: int, remote_blocks: int, fetched_s: float, local_s: float) -> bool:
        return remote_blocks > self.threshold * local_blocks


@dataclass(frozen=True)
class Goodput(Policy):
    """The default: the least waiting for all requests together, within the SLOs.

    A request goes where its own TTFT plus the delay of requests that wait there is the least. Short prefills
    overtake long ones, so the wait that a long one can cause is bounded by its own cost. Prefills that can
    keep the TTFT SLO overtake those that cannot.
    """

    name = "goodput"
    fetches = True
    counts_cache = True
    weighs_paths = True
    # Among nodes within this tie (estimates are that uncertain), the one with more of the prefix and then the
    # one given the fewest requests is chosen, so that equal nodes share the work and the cache. The tie must
    # be narrow: a request that is placed behind a queue delays those that come after it.
    tie_ratio: float = 1.05
    tie_s: float = 1e-4
    widest_tie_s: float = 1e-3
    # A fetch costs both nodes time that is in no estimate: it must gain at least this.
    least_gain_s: float = 2e-3
    # Prefills that arrive within this many times a prefill's own compute time may overtake it.
    patience: float = 8.0
    longest_patience_s: float = 120.0
    # One that misses the TTFT SLO anyway lets those pass that can keep it, but not for ever.
    late_patience_s: float = 300.0
    # A decode node computes the rest of a prompt that it has the beginning of, and only where that takes at
    # most so many of its decode steps: it is there for steps without prompts.
    longest_rest_steps: float = 4.0

    def takes(self, local_blocks: int, remote_blocks: int, fetched_s: float, local_s: float) -> bool:
        return fetched_s + self.least_gain_s < local_s

    def patience_s(self, compute_s: float, late: bool = False) -> float:
        return self.late_patience_s if late else min(self.patience * compute_s, self.longest_patience_s)

    def slack_s(self, slo: Slo, usual: Slo) -> float:
        # The difference of the deadlines: among requests of one SLO the order is as without SLOs.
        most_s = self.late_patience_s
        return min(slo.ttft_s, most_s) - min(usual.ttft_s, most_s)

    def prefill(self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo) -> PrefillChoice:
        in_time = [c for c in candidates if c.ttft_s <= slo.ttft_s] or candidates
        costs_s = [c.ttft_s + c.num_delayed * c.compute_s + c.delay_s + c.egress_s for c in in_time]
        best_s = min(costs_s)
        most_s = best_s + min((self.tie_ratio - 1) * best_s, self.widest_tie_s) + self.tie_s
        near = [c for c, cost_s in zip(in_time, costs_s, strict=True) if cost_s <= most_s]
        chosen = min(near, key=lambda c: (-c.local_tokens, c.num_placed, c.ttft_s, c.node_id))
        return chosen, _reason(chosen, candidates)

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView, slo: Slo) -> DecodeEstimate:
        best_s = min([c.total_s + c.delay_s + c.egress_s for c in candidates])
        # A whole answer takes long and its estimate is as uncertain: the widest tie is for first tokens.
        most_s = best_s * self.tie_ratio + self.tie_s
        near = [c for c in candidates if c.total_s + c.delay_s + c.egress_s <= most_s]
        return min(near, key=lambda c: (-c.local_tokens, c.num_running, c.num_placed, c.node_id))

    def computes_rest(self, prefill: PrefillEstimate, decode: DecodeEstimate) -> bool:
        return prefill.local_tokens > 0 and prefill.compute_s <= self.longest_rest_steps * decode.step_s


_ALL: tuple[Policy, ...] = (Goodput(), KvAware(), LocalCache(), LeastLoaded(), RoundRobin(), Random())

POLICIES: Mapping[str, Policy] = {policy.name: policy for policy in _ALL}


def _reason(chosen: PrefillEstimate, candidates: Sequence[PrefillEstimate]) -> Reason:
    if chosen.fetched_tokens:
        return Reason.TRANSFER
    if len(candidates) == 1:
        return Reason.ONLY
    others = [candidate.local_tokens for candidate in candidates if candidate is not chosen]
    return Reason.LOCALITY if chosen.local_tokens > max(others) else Reason.LOAD
