"""Placement policies by name: each picks one estimate of those that ``place`` computed.

``local-cache`` and ``kv-aware`` are those of the Mooncake paper (Qin et al., FAST'25: cache-aware prefill
scheduling and its Algorithm 1), ``goodput`` is Moonpool's own. All are pure and serve live requests and
simulated ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView
from moonpool.conductor.placing.placement import DecodeEstimate, PrefillEstimate, Reason


class Policy(Protocol):
    """Chooses among candidates; the sequences are non-empty and must not be changed."""

    @property
    def name(self) -> str: ...

    @property
    def fetches(self) -> bool:
        """Whether a prefix may be read from another node."""
        ...

    @property
    def counts_cache(self) -> bool:
        """Whether it matters who holds what: False, the queue alone says which nodes are worth a look."""
        ...

    @property
    def counts_load(self) -> bool:
        """Whether it matters how busy nodes are: False, a choice stands whatever others give the node."""
        ...

    def first(self, view: ClusterView, count: int) -> int | None:
        """The position among ``count`` nodes at which to begin, for policies that look at nothing else."""
        ...

    def takes(self, local_blocks: int, remote_blocks: int, fetched_s: float, local_s: float) -> bool:
        """Whether a node that holds ``local_blocks`` fetches ``remote_blocks``: seconds to the first token
        with the fetch and without it.
        """
        ...

    def patience_s(self, compute_s: float) -> float:
        """Later prefills that come within this time may pass one that computes for ``compute_s``."""
        ...

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo
    ) -> tuple[PrefillEstimate, Reason]: ...

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView, slo: Slo) -> DecodeEstimate: ...


class _Plain:
    """First come first served, nothing fetched, decode by load: what the simple policies have in common."""

    fetches = False
    counts_cache = False
    counts_load = True

    def first(self, view: ClusterView, count: int) -> int | None:
        return None

    def takes(self, local_blocks: int, remote_blocks: int, fetched_s: float, local_s: float) -> bool:
        return False

    def patience_s(self, compute_s: float) -> float:
        return 0.0

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView, slo: Slo) -> DecodeEstimate:
        return min(candidates, key=lambda c: (c.wait_s, c.step_s, c.num_placed, c.node_id))


@dataclass(frozen=True)
class Random(_Plain):
    """Anyone."""

    name = "random"
    counts_load = False

    def first(self, view: ClusterView, count: int) -> int | None:
        return int(view.draw * count)

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo
    ) -> tuple[PrefillEstimate, Reason]:
        return candidates[0], Reason.CHANCE

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView, slo: Slo) -> DecodeEstimate:
        # The digits of the draw that the first choice did not use.
        return candidates[int(view.draw * 4096 % 1.0 * len(candidates))]


@dataclass(frozen=True)
class RoundRobin(_Plain):
    """One after the other."""

    name = "round-robin"
    counts_load = False

    def first(self, view: ClusterView, count: int) -> int | None:
        return view.turn % count

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo
    ) -> tuple[PrefillEstimate, Reason]:
        return candidates[0], Reason.TURN

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView, slo: Slo) -> DecodeEstimate:
        # The quotient moves the pairing on, so that each prefill node works with every decode node.
        turn = view.turn + view.turn // len(candidates)
        return candidates[turn % len(candidates)]


@dataclass(frozen=True)
class LeastLoaded(_Plain):
    """The shortest queue, whatever is cached where."""

    name = "least-loaded"

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo
    ) -> tuple[PrefillEstimate, Reason]:
        return min(candidates, key=lambda c: (c.queue_s, c.num_placed, c.node_id)), Reason.LOAD


@dataclass(frozen=True)
class LocalCache(_Plain):
    """The earliest first token where each node has only its own cache."""

    name = "local-cache"
    counts_cache = True

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo
    ) -> tuple[PrefillEstimate, Reason]:
        chosen = min(candidates, key=lambda c: (c.ttft_s, c.num_placed, c.node_id))
        return chosen, _reason(chosen, candidates)


@dataclass(frozen=True)
class KvAware(LocalCache):
    """The earliest first token where a prefix may be fetched: Mooncake's Algorithm 1."""

    name = "kv-aware"
    fetches = True
    # kvcache_balancing_threshold: fetch when the longest prefix is more than so many times the node's own.
    threshold: float = 1.0

    def takes(self, local_blocks: int, remote_blocks: int, fetched_s: float, local_s: float) -> bool:
        return remote_blocks > self.threshold * local_blocks


@dataclass(frozen=True)
class Goodput:
    """The default: the least waiting for all together, within what the SLOs allow.

    A request goes where its own first token and the delay of those that wait there cost the least. Short
    prefills pass long ones, so the wait that a long one can cause is bounded by what it costs itself.
    """

    name = "goodput"
    fetches = True
    counts_cache = True
    counts_load = True
    # Among nodes as good as this (estimates are that uncertain), the one with more of the prefix and then
    # the one given the fewest requests is taken, so that equal nodes share the work and the cache. The window
    # must be narrow: whoever is placed behind a queue delays those that come after.
    tie_ratio: float = 1.05
    tie_s: float = 1e-4
    widest_tie_s: float = 1e-3
    # A fetch takes time of both nodes that is in no estimate: one that gains less is not worth it.
    least_gain_s: float = 2e-3
    # A prefill lets those pass that come within so many times what it computes for.
    patience: float = 8.0
    longest_patience_s: float = 120.0

    def first(self, view: ClusterView, count: int) -> int | None:
        return None

    def takes(self, local_blocks: int, remote_blocks: int, fetched_s: float, local_s: float) -> bool:
        return fetched_s + self.least_gain_s < local_s

    def patience_s(self, compute_s: float) -> float:
        return min(self.patience * compute_s, self.longest_patience_s)

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo
    ) -> tuple[PrefillEstimate, Reason]:
        in_time = [c for c in candidates if c.ttft_s <= slo.ttft_s] or candidates
        most_s = self._tie(min([c.ttft_s + c.num_delayed * c.compute_s for c in in_time]))
        near = [c for c in in_time if c.ttft_s + c.num_delayed * c.compute_s <= most_s]
        chosen = min(near, key=lambda c: (-c.local_tokens, c.num_placed, c.ttft_s, c.node_id))
        return chosen, _reason(chosen, candidates)

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView, slo: Slo) -> DecodeEstimate:
        best_s = min([c.total_s + c.delay_s for c in candidates])
        # A whole answer takes long and its estimate is as uncertain: the widest tie is for first tokens.
        near = [c for c in candidates if c.total_s + c.delay_s <= best_s * self.tie_ratio + self.tie_s]
        return min(near, key=lambda c: (-c.local_tokens, c.num_running, c.num_placed, c.node_id))

    def _tie(self, best_s: float) -> float:
        return best_s + min((self.tie_ratio - 1) * best_s, self.widest_tie_s) + self.tie_s


_ALL: tuple[Policy, ...] = (Goodput(), KvAware(), LocalCache(), LeastLoaded(), RoundRobin(), Random())

POLICIES: Mapping[str, Policy] = {policy.name: policy for policy in _ALL}


def _reason(chosen: PrefillEstimate, candidates: Sequence[PrefillEstimate]) -> Reason:
    if chosen.fetched_tokens:
        return Reason.TRANSFER
    if len(candidates) == 1:
        return Reason.ONLY
    others = [candidate.local_tokens for candidate in candidates if candidate is not chosen]
    return Reason.LOCALITY if chosen.local_tokens > max(others) else Reason.LOAD
