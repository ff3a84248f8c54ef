"""How many nodes of a role the load needs. Pure: the conductor and the simulator use the same functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.node_view import NodeView

# Without an SLO of the first token: the part of the time that prefill nodes may compute.
_UTILISATION = 0.8
# The part of the TBT limit that a predicted step may take, and of a pool that sequences may hold: contexts
# grow and the SLO is on the slowest gaps. Rejection uses 0.9: there, nothing may be added any more.
_STEP_PART = 0.8
_POOL_PART = 0.8
_LEAST_CLEAR_S = 10.0
# In a burst short prompts overtake: so many times the mean rate begins to decode at times.
_CLUMP = 2.0
# The part of the slack that a queue may take: the rest is for prompts that others overtake, and for a burst
# that grows.
_SLACK_PART = 0.7
_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class Need:
    """``nodes`` that serve, and why so many, as a sentence."""

    nodes: int
    why: str


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """``requests_per_s`` that arrive, each ``compute_s`` on average; ``queued_s``: work of one node that
    waits, on all nodes. ``variation``: squared coefficient of variation of the compute time. ``mean_per_s``:
    requests over minutes; ``latest_nodes``: the nodes that what arrives now keeps busy.
    """

    requests_per_s: float = 0.0
    compute_s: float = 0.0
    variation: float = 1.0
    queued_s: float = 0.0
    mean_per_s: float = 0.0
    latest_nodes: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A step of one node that ran all sequences would take ``base_s`` + ``load_s``. ``used_blocks``: of KV,
    by sequences, of all nodes; ``node_blocks``: in one pool; 0: unknown. ``sequence_s``: part of one sequence
    in ``load_s``; ``num_placed``: sequences that decode, or will once they are prefilled.
    """

    base_s: float = 0.0
    load_s: float = 0.0
    used_blocks: int = 0
    node_blocks: int = 0
    sequence_s: float = 0.0
    num_placed: int = 0

    def grown(self, ratio: float) -> DecodeLoad:
        used_blocks = round(self.used_blocks * ratio)
        return replace(self, load_s=self.load_s * ratio, used_blocks=used_blocks)

    def fed(self, requests_per_s: float, output_tokens: float, slo: Slo) -> DecodeLoad:
        """With what prefill nodes will bring: ``requests_per_s`` that decode for their tokens at the step of
        the SLO, no more than are placed.
        """
        if not math.isfinite(slo.tbt_s):
            return self
        decoding = _CLUMP * requests_per_s * output_tokens * _STEP_PART * slo.tbt_s
        load_s = min(decoding, self.num_placed) * self.sequence_s
        return replace(self, load_s=max(self.load_s, load_s))


def prefill_queue_s(views: Iterable[NodeView], now_s: float) -> float:
    """Seconds of work that wait on prefill nodes, all conductors' together."""
    return sum(view.queue.wait_s(now_s) + view.foreign_queue_s for view in views)


def decode_load(views: Iterable[NodeView], now_s: float) -> DecodeLoad:
    """The load of decode nodes together."""
    bases, load_s, used, pools = [], 0.0, 0, []
    placed_s, num_placed = 0.0, 0
    for view in views:
        base_s = view.cost.step_s(0, 0, now_s)
        bases.append(base_s)
        placed_s += view.cost.step_s(view.num_running, view.num_context_tokens, now_s) - base_s
        num_placed += view.num_running
        # Those that wait for their prefill will not all decode at once.
        load_s += view.cost.step_s(view.num_decoding, view.num_batch_tokens, now_s) - base_s
        if view.num_blocks:
            used += max(view.num_blocks - view.num_free_blocks, 0)
            pools.append(view.num_blocks)
    sequence_s = placed_s / max(num_placed, 1)
    return DecodeLoad(max(bases, default=0.0), load_s, used, min(pools, default=0), sequence_s, num_placed)


def queue_need(load: PrefillLoad, slo: Slo, *, join_s: float, ready: int) -> float:
    """The nodes that do in time what waits, where ``ready`` serve now and the others after ``join_s``.

    In time: what waits now within the slack that the TTFT SLO leaves, and as soon what arrives until they
    serve. Where a node takes longer to join than the slack, what waits is late by then, and is to be done
    within as long again.
    """
    slack_s = _SLACK_PART * (slo.ttft_s - load.compute_s)
    if not math.isfinite(slack_s) or slack_s <= join_s:
        return load.queued_s / max(join_s, _LEAST_CLEAR_S)
    waiting = (load.queued_s - ready * join_s) / (slack_s - join_s)
    arriving = (load.queued_s + (load.latest_nodes - ready) * join_s) / slack_s
    return max(waiting, arriving, load.queued_s / slack_s)


def prefill_need(load: PrefillLoad, slo: Slo, *, attained: float, join_s: float, ready: int) -> Need:
    """The fewest nodes at which a fraction ``attained`` of requests waits little enough for the TTFT SLO, and
    which do in time what waits (see ``queue_need``).

    Waiting is that of a queue with so many servers: with probability p > t it waits longer than t, where
    p = P(all are busy) · exp(-2 (1 - ρ) n t / (s (1 + v))), s and v the mean and the variation of a request.
    P(all are busy) ≈ ρ^(√(2(n+1)) - 1) (Sakasegawa). The requests that wait are among those of the rate, so
    the larger of both needs counts, not their sum. Where requests can wait for nodes to join, the rate is the
    mean one: the queue tells of a burst, and its work is all that it needs nodes for.
    """
    slack_s = slo.ttft_s - load.compute_s
    waits = math.isfinite(slack_s) and _SLACK_PART * slack_s > join_s
    if waits:
        load = replace(load, requests_per_s=min(load.mean_per_s, load.requests_per_s))
    busy = load.requests_per_s * load.compute_s
    by_queue = queue_need(load, slo, join_s=join_s, ready=ready)
    least = max(1, math.ceil(busy), math.ceil(by_queue))
    what = f"{busy:.2f} nodes compute on average"
    if by_queue > 0.5:
        what += f", {load.queued_s:.1f} s of work wait and {load.latest_nodes:.1f} nodes' more arrives"
    if not math.isfinite(slo.ttft_s):
        nodes = max(least, math.ceil(busy / _UTILISATION))
        return Need(nodes, f"{what}; {_UTILISATION:.0%} of the time is the most")
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
    """The fewest nodes that keep the TBT SLO with their steps and have room in their pools."""
    nodes, why = 1, "one node's step and pool suffice"
    room_s = _STEP_PART * slo.tbt_s - load.base_s
    if math.isfinite(slo.tbt_s) and room_s > 0 and (by_step := math.ceil(load.load_s / room_s)) > nodes:
        nodes = by_step
        why = f"with {nodes}, a step takes {_STEP_PART:.0%} of the TBT SLO of {slo.tbt_s:g} s or less"
    by_pool = math.ceil(load.used_blocks / (_POOL_PART * load.node_blocks)) if load.node_blocks else 0
    if by_pool > nodes:
        nodes, why = by_pool, f"{load.used_blocks:,} blocks in use fill {by_pool} pools to {_POOL_PART:.0%}"
    return Need(nodes, why)
