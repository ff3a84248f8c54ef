"""Stages of a cluster by formula: prefill nodes, decode nodes, and replicas that do both.

The seconds of prefills and steps are those of ``tensor_parallel``, a roofline: 2 FLOPs a parameter and token
plus attention over arithmetic, weights and KV over memory bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moonpool.simulator.inputs.hardware import Hardware
from moonpool.simulator.sizing.delays import NORMAL_P99, Delay, pooled, queue, shared_link
from moonpool.simulator.sizing.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Kind:
    """A node: ``tp`` GPUs in each of ``pp`` pipeline stages. ``lane``: what one of ``pp`` prompts gets."""

    tp: int
    pp: int
    lane: Hardware

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def name(self) -> str:
        return f"tp {self.tp}" + (f" pp {self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True, slots=True)
class Stage:
    """Equal nodes for one phase, or for both."""

    kind: Kind
    num_nodes: int
    chunk_tokens: int

    @property
    def num_lanes(self) -> int:
        return self.num_nodes * self.kind.pp

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.kind.num_gpus


@dataclass(frozen=True, slots=True)
class Prefills:
    """``busy``: fraction of the lanes' time. ``compute_s``: of one prompt, without the wait."""

    wait: Delay
    compute_s: float
    busy: float


@dataclass(frozen=True, slots=True)
class Decodes:
    """``batch``: sequences of a lane. ``answer``: from the first token to the last."""

    batch: float
    step_s: float
    slow_step_s: float  # with the batch of the 99th percentile
    answer: Delay
    busy: float  # how much of a step grows with the batch: 1 is the end of the lane's capacity


def prompt_s(lane: Hardware, traffic: Traffic, chunk_tokens: int) -> float:
    """Compute a prompt alone: a base for each chunk, and its tokens."""
    chunks = -(-traffic.computed_tokens // chunk_tokens)
    profile = lane.profile
    tokens_s = profile.tokens_s(traffic.computed_tokens, traffic.cached_tokens)
    return chunks * profile.prefill_base_s + tokens_s


def growth_s(lane: Hardware, traffic: Traffic) -> float:
    """What a sequence adds to a decode step."""
    return lane.profile.step_growth_s(traffic.context_tokens)


def prefills(stage: Stage, traffic: Traffic) -> Prefills | None:
    """None: the prompts' compute exceeds the lanes, or one does not fit a pool."""
    lane = stage.kind.lane
    if traffic.in_blocks(traffic.prompt_tokens) > lane.pool_tokens:
        return None
    compute_s = prompt_s(lane, traffic, stage.chunk_tokens)
    wait = queue(stage.num_lanes, compute_s, traffic.rate)
    if wait is None:
        return None
    return Prefills(wait, compute_s, traffic.rate * compute_s / stage.num_lanes)


def decodes(stage: Stage, traffic: Traffic) -> Decodes | None:
    """A batch that is in balance with its arrivals. None: it grows without end, or beyond memory.

    A step takes ``base + growth × batch``, and Little's law says ``batch = rate × gaps × step``, so
    ``step = base / (1 - busy)`` with ``busy = rate × gaps × growth``. The batch varies as in processor
    sharing: the variance of its diffusion (linear noise) is ``batch / (1 - busy)``; placement by load spreads
    it over all lanes.
    """
    return _batch(stage, traffic, prompts_s=0.0)


def _batch(stage: Stage, traffic: Traffic, prompts_s: float) -> Decodes | None:
    """``prompts_s``: seconds a second in which the lane computes prompts."""
    lane, lanes = stage.kind.lane, stage.num_lanes
    rate, base_s = traffic.rate / lanes, lane.profile.decode_base_s
    growing = growth_s(lane, traffic)
    busy = prompts_s + rate * traffic.gaps * growing
    if busy >= 1:
        return None
    gap_s = base_s / (1 - busy)
    batch = rate * traffic.gaps * gap_s
    more = NORMAL_P99 * math.sqrt(batch / (pooled(lanes) * (1 - busy)))
    room = lane.pool_tokens / traffic.in_blocks(traffic.prompt_tokens + traffic.output_tokens)
    if batch + more > min(room, lane.max_batch_size):
        return None
    # What more sequences add also delays the prompts between the steps, which come no more slowly.
    more_s = growing * more / (1 - prompts_s)
    step_s = base_s + growing * batch
    answer = Delay(traffic.gaps * gap_s, traffic.gaps * more_s)
    return Decodes(batch, step_s, step_s + growing * more, answer, busy)


def hand_over(prefill: Stage, decode: Stage, traffic: Traffic) -> Delay | None:
    """Seconds from the end of a prefill until its blocks have moved. None: the links are too slow.

    Chunks move while the next is computed. Left are the last chunk, and what the link could not carry. The
    decode node has the shared prefix.
    """
    lane = prefill.kind.lane
    link = min(lane.network_nbytes_per_s, decode.kind.lane.network_nbytes_per_s)
    nbytes = traffic.computed_tokens * lane.kv_token_nbytes
    used = traffic.rate * nbytes / (link * min(prefill.num_lanes, decode.num_lanes))
    compute_s = prompt_s(lane, traffic, prefill.chunk_tokens)
    last = min(traffic.computed_tokens, prefill.chunk_tokens) * lane.kv_token_nbytes
    left = max(nbytes - compute_s * link, last)
    moved = shared_link(left / link, used)
    return None if moved is None else Delay(moved.mean_s + lane.network_latency_s, moved.tail_s)


def replicas(stage: Stage, traffic: Traffic) -> tuple[Prefills, Decodes] | None:
    """Nodes that decode in every step and compute a chunk of one prompt beside it.

    A prompt's chunks take their own time and that of the batch's steps, so the wait is that of ``queue`` with
    this service time. The batch advances in every step: ``1 = prompts' time + steps × (base + growth ×
    batch)`` a second.
    """
    lane, lanes = stage.kind.lane, stage.num_lanes
    if traffic.in_blocks(traffic.prompt_tokens + traffic.output_tokens) > lane.pool_tokens:
        return None
    rate, chunks, chunk_tokens = traffic.rate / lanes, 0, stage.chunk_tokens
    found, compute_s = None, 0.0
    while chunk_tokens >= 1:
        needed = -(-traffic.computed_tokens // chunk_tokens)
        if needed == chunks:
            break
        # The batch takes its part of a step's tokens, so more chunks may be needed, and then more time.
        chunks = needed
        compute_s = prompt_s(lane, traffic, chunk_tokens)
        found = _batch(stage, traffic, rate * compute_s)
        if found is None:
            return None
        chunk_tokens = min(chunk_tokens, stage.chunk_tokens - math.ceil(found.batch))
    if found is None or chunk_tokens < 1:
        return None
    service_s = compute_s + chunks * found.step_s
    wait = queue(lanes, service_s, traffic.rate)
    if wait is None:
        return None
    # A prompt arrives in the middle of a step.
    wait = Delay(wait.mean_s + found.step_s / 2, wait.tail_s)
    # The prompts that come while a request decodes vary too; placement spreads them over the lanes.
    prompts = rate * found.answer.mean_s
    varies_s = NORMAL_P99 * compute_s * math.sqrt(prompts / pooled(lanes))
    answer = found.answer + Delay(0.0, varies_s)
    # The last chunk attends to the whole prompt: it is the slowest.
    last = min(chunk_tokens, traffic.computed_tokens)
    chunk_s = lane.profile.prefill_s(last, traffic.prompt_tokens - last)
    mixed_s = _slow_tenth_s(found, traffic, chunk_s, chunks * prompts)
    ready = Decodes(found.batch, found.step_s, mixed_s, answer, found.busy)
    return Prefills(wait, service_s, rate * service_s), ready


def _slow_tenth_s(found: Decodes, traffic: Traffic, chunk_s: float, num_chunks: float) -> float:
    """The mean of the longest tenth of the gaps; ``num_chunks``: chunks computed beside them, on average."""
    most = num_chunks + NORMAL_P99 * math.sqrt(num_chunks)
    slow = min(most / (traffic.gaps / 10), 1.0)
    return found.slow_step_s + slow * chunk_s
