"""How many nodes of a role the load needs. Pure: the conductor and the simulator use the same functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.node_view import NodeView

# Without an SLO of the first token: the part of the time that prefill nodes may compute.
_UTILISATION = 0.8
# The part of the TBT limit that a predicted step may take, and of a pool that sequences may hold: contexts
# grow and the SLO is on the slowest gaps. Rejection uses 0.9: there, nothing may be added any more.
_STEP_PART = 0.8
_POOL_PART = 0.8
_LEAST_CLEAR_S = 10.0
_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class Need:
    """``nodes`` that serve, and why so many, as a sentence."""

    nodes: int
    why: str


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """``requests_per_s`` that arrive, each ``compute_s`` on average; ``queued_s``: work of one node that
    waits, on all nodes. ``variation``: squared coefficient of variation of the compute time.
    """

    requests_per_s: float = 0.0
    compute_s: float = 0.0
    variation: float = 1.0
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A step of one node that ran all sequences would take ``base_s`` + ``load_s``. ``used_blocks``: of KV,
    by sequences, of all nodes; ``node_blocks``: in one pool; 0: unknown.
    """

    base_s: float = 0.0
    load_s: float = 0.0
    used_blocks: int = 0
    node_blocks: int = 0

    def grown(self, ratio: float) -> DecodeLoad:
        return DecodeLoad(self.base_s, self.load_s * ratio, round(self.used_blocks * ratio), self.node_blocks)


def prefill_queue_s(views: Iterable[NodeView], now_s: float) -> float:
    """Seconds of work that wait on prefill nodes, all conductors' together."""
    return sum(view.queue.wait_s(now_s) + view.foreign_queue_s for view in views)


def decode_load(views: Iterable[NodeView], now_s: float) -> DecodeLoad:
    """The load of decode nodes together."""
    bases, load_s, used, pools = [], 0.0, 0, []
    for view in views:
        base_s = view.cost.step_s(0, 0, now_s)
        bases.append(base_s)
        load_s += view.cost.step_s(view.num_running, view.num_context_tokens, now_s) - base_s
        if view.num_blocks:
            used += max(view.num_blocks - view.num_free_blocks, 0)
            pools.append(view.num_blocks)
    return DecodeLoad(max(bases, default=0.0), load_s, used, min(pools, default=0))


def clear_within_s(slo: Slo, compute_s: float, join_s: float) -> float:
    """In how long work that waits should be done, by nodes that serve after ``join_s``.

    Requests that wait can keep the TTFT SLO only where it is longer than a node takes to join.
    """
    slack_s = slo.ttft_s - compute_s
    if not math.isfinite(slack_s) or slack_s <= join_s:
        return max(join_s, _LEAST_CLEAR_S)
    return max(slack_s - join_s, slack_s / 3)


def prefill_need(load: PrefillLoad, slo: Slo, *, attained: float, clear_s: float) -> Need:
    """The fewest nodes at which a fraction ``attained`` of requests waits little enough for the TTFT SLO, and
    which do the work that waits within ``clear_s``.

    Waiting is that of a queue with so many servers: with probability p > t it waits longer than t, where
    p = P(all are busy) · exp(-2 (1 - ρ) n t / (s (1 + v))), s and v the mean and the variation of a request.
    P(all are busy) ≈ ρ^(√(2(n+1)) - 1) (Sakasegawa). The requests that wait are among those of the rate, so
    the larger of both needs counts, not their sum.
    """
    busy = load.requests_per_s * load.compute_s
    backlog = load.queued_s / clear_s
    least = max(1, math.ceil(busy), math.ceil(backlog))
    what = f"{busy:.2f} nodes compute on average"
    if backlog > 0.5:
        what += f", {load.queued_s:.1f} s of work wait and should be done in {clear_s:.0f} s"
    if not math.isfinite(slo.ttft_s):
        nodes = max(least, math.ceil(busy / _UTILISATION))
        return Need(nodes, f"{what}; {_UTILISATION:.0%} of the time is the most")
    slack_s = slo.ttft_s - load.compute_s
    if slack_s <= 0:
        return Need(least, f"{what}; a prompt alone takes longer than the TTFT SLO")
    nodes = least
    while nodes < _MOST and _late(busy, nodes, slack_s, load) > 1 - attained:
        nodes += 1
    return Need(nodes, f"{what}; with {nodes}, {attained:.0%} of first tokens take {slo.ttft_s:g} s or less")


def _late(busy: float, nodes: int, slack_s: float, load: PrefillLoad) -> float:
    """The fraction of requests that wait longer than ``slack_s``."""
    used = busy / nodes
    if used >= 1:
        return 1.0
    if not load.compute_s:
        return 0.0
    all_busy = used ** (math.sqrt(2 * (nodes + 1)) - 1)
    pace = 2 * (1 - used) * nodes / (load.compute_s * (1 + load.variation))
    return float(all_busy * math.exp(-pace * slack_s))


def decode_need(load: DecodeLoad, slo: Slo) -> Need:
    """The fewest nodes whose steps keep the TBT SLO and whose pools have room."""
    nodes, why = 1, "one node's step and pool suffice"
    room_s = _STEP_PART * slo.tbt_s - load.base_s
    if math.isfinite(slo.tbt_s) and room_s > 0 and (by_step := math.ceil(load.load_s / room_s)) > nodes:
        nodes = by_step
        why = f"with {nodes}, a step takes {_STEP_PART:.0%} of the TBT SLO of {slo.tbt_s:g} s or less"
    by_pool = math.ceil(load.used_blocks / (_POOL_PART * load.node_blocks)) if load.node_blocks else 0
    if by_pool > nodes:
        nodes, why = by_pool, f"{load.used_blocks:,} blocks in use fill {by_pool} pools to {_POOL_PART:.0%}"
    return Need(nodes, why)
