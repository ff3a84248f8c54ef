"""The smallest cluster by formula that keeps the limits: both phases searched apart, and replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.hardware import Accelerator, ModelShape, tensor_parallel
from moonpool.simulator.sizing.delays import Delay
from moonpool.simulator.sizing.stages import (
    Decodes,
    Kind,
    Prefills,
    Stage,
    decodes,
    growth_s,
    hand_over,
    prefills,
    prompt_s,
    replicas,
)
from moonpool.simulator.sizing.traffic import Limits, Traffic

# Tokens of a step, tried for every kind of cluster: the comparison is between equals.
CHUNKS = (256, 512, 1024, 2048, 8192)
# More prefill nodes are tried until the wait is this part of the compute time.
_SHORT_WAIT = 0.01


@dataclass(frozen=True, slots=True)
class Plan:
    """A cluster for a workload. ``decode`` is None for replicas, which ``prefill`` then describes."""

    prefill: Stage
    decode: Stage | None
    prefills: Prefills
    decodes: Decodes
    move: Delay  # of the hand-over
    tbt_s: float  # p99 of the mean of the longest tenth of a request's gaps

    @property
    def num_gpus(self) -> int:
        return self.prefill.num_gpus + (self.decode.num_gpus if self.decode else 0)

    @property
    def name(self) -> str:
        if self.decode is None:
            return f"{_nodes(self.prefill, 'replica')}, chunks of {self.prefill.chunk_tokens}"
        return f"{_nodes(self.prefill, 'prefill node')} + {_nodes(self.decode, 'decode node')}"

    @property
    def ttft(self) -> Delay:
        return self.prefills.wait + Delay(self.prefills.compute_s)

    @property
    def e2e(self) -> Delay:
        return self.ttft + self.move + self.decodes.answer

    def keeps(self, limits: Limits) -> bool:
        return limits.kept(self.ttft.p99_s, self.tbt_s, self.e2e.p99_s)


def _nodes(stage: Stage, noun: str) -> str:
    return f"{stage.num_nodes:,} {noun}{'s' if stage.num_nodes > 1 else ''} of {stage.kind.name}"


def kinds(gpu: Accelerator, model: ModelShape, sizes: Sequence[int]) -> list[Kind]:
    """Return the nodes of these numbers of GPUs that hold the weights: every split into tp × pp.

    Raises:
        ConfigError: there is none; says how many GPUs hold the weights.
    """
    found = list(_kinds(gpu, model, sizes))
    if not found:
        enough = next((size for size in range(1, 1025) if list(_kinds(gpu, model, [size]))), None)
        raise ConfigError(
            f"{model.name} ({model.weight_nbytes / 1e9:.0f} GB of weights) does not fit a node of "
            f"{' or '.join(map(str, sizes))} × {gpu.name}; give --parallel {enough} or more",
            key="parallel",
        )
    return found


def _kinds(gpu: Accelerator, model: ModelShape, sizes: Sequence[int]) -> Iterator[Kind]:
    for size in sizes:
        for tp in range(size, 0, -1):
            pp = size // tp
            if tp * pp != size or model.num_layers % pp or model.hidden_size % tp:
                continue
            try:
                yield Kind(tp, pp, tensor_parallel(gpu, model, tp, pp))
            except ConfigError:
                continue


def with_link(found: Sequence[Kind], nbytes_per_s: float) -> list[Kind]:
    """The same nodes with links of so many bytes a second for each GPU."""
    return [
        replace(kind, lane=replace(kind.lane, network_nbytes_per_s=nbytes_per_s * kind.tp)) for kind in found
    ]


def evaluate(prefill: Stage, decode: Stage | None, traffic: Traffic) -> Plan | None:
    """The latencies of these nodes; ``decode`` None: of replicas. None: they cannot keep up."""
    if decode is None:
        found = replicas(prefill, traffic)
        if found is None:
            return None
        return Plan(prefill, None, *found, Delay(0.0), found[1].slow_step_s)
    first, then = prefills(prefill, traffic), decodes(decode, traffic)
    if first is None or then is None:
        return None
    return _joined(prefill, decode, first, then, traffic)


def _joined(prefill: Stage, decode: Stage, first: Prefills, then: Decodes, traffic: Traffic) -> Plan | None:
    move = hand_over(prefill, decode, traffic)
    if move is None:
        return None
    # A request joins the batch at the end of a step.
    move = Delay(move.mean_s + then.step_s / 2, move.tail_s)
    tbt_s = then.slow_step_s + move.p99_s / math.ceil(traffic.gaps / 10)
    return Plan(prefill, decode, first, then, move, tbt_s)


def smallest_split(found: Sequence[Kind], traffic: Traffic, limits: Limits) -> Plan | None:
    """The prefill and decode nodes with the fewest GPUs that keep the limits. None: there are none.

    Each phase has its own kind of node (as in DistServe, OSDI'24, section 4.1); a limit of the whole answer
    is divided between them by trying every number of prefill nodes that shortens it.
    """
    best: Plan | None = None
    for kind in found:
        for chunk in _chunks(traffic):
            for stage, first in _prefill_stages(kind, chunk, traffic, limits):
                if best is not None and stage.num_gpus >= best.num_gpus:
                    break
                for decode_kind in found:
                    best = _with_decode(stage, first, decode_kind, traffic, limits, best)
    return best


def _chunks(traffic: Traffic) -> list[int]:
    """Chunk sizes that differ for these prompts."""
    shorter = [chunk for chunk in CHUNKS if chunk < traffic.computed_tokens]
    return [*shorter, next((chunk for chunk in CHUNKS if chunk >= traffic.computed_tokens), CHUNKS[-1])]


def _prefill_stages(
    kind: Kind, chunk: int, traffic: Traffic, limits: Limits
) -> Iterator[tuple[Stage, Prefills]]:
    compute_s = prompt_s(kind.lane, traffic, chunk)
    if compute_s > min(limits.ttft_s, limits.e2e_s):
        return
    link_s = traffic.computed_tokens * kind.lane.kv_token_nbytes / kind.lane.network_nbytes_per_s
    count = max(int(traffic.rate * max(compute_s, link_s) / kind.pp), 1)
    while True:
        stage = Stage(kind, count, chunk)
        first = prefills(stage, traffic)
        if first is not None:
            if first.wait.p99_s + compute_s <= limits.ttft_s:
                yield stage, first
            if first.wait.p99_s <= _SHORT_WAIT * compute_s:
                return
        elif traffic.in_blocks(traffic.prompt_tokens) > kind.lane.pool_tokens:
            return
        count += 1


def _with_decode(
    prefill: Stage, first: Prefills, kind: Kind, traffic: Traffic, limits: Limits, best: Plan | None
) -> Plan | None:
    """Add the fewest decode nodes of a kind that keep the limits; return the better of that and ``best``."""

    def plan(count: int) -> Plan | None:
        stage = Stage(kind, count, prefill.chunk_tokens)
        then = decodes(stage, traffic)
        found = _joined(prefill, stage, first, then, traffic) if then is not None else None
        return found if found is not None and found.keeps(limits) else None

    most = _most(kind, traffic)
    if best is not None:
        most = min(most, (best.num_gpus - prefill.num_gpus - 1) // kind.num_gpus)
    return _fewest(plan, most) or best


def _most(kind: Kind, traffic: Traffic) -> int:
    """More nodes than this shorten nothing: each lane has far less than one sequence, and an idle link."""
    lane = kind.lane
    step_s = lane.profile.step_s(1, traffic.context_tokens)
    link_s = traffic.computed_tokens * lane.kv_token_nbytes / lane.network_nbytes_per_s
    busy = traffic.rate * max(traffic.gaps * step_s, link_s, prompt_s(lane, traffic, CHUNKS[0]))
    return 16 + 64 * math.ceil(busy / kind.pp)


def _fewest(plan: Callable[[int], Plan | None], most: int) -> Plan | None:
    """Bisect the smallest count from 1 to ``most`` with a plan: more nodes are never slower."""
    found = plan(most) if most >= 1 else None
    low, high = 0, most
    while found is not None and high - low > 1:
        middle = (low + high) // 2
        smaller = plan(middle)
        if smaller is None:
            low = middle
        else:
            found, high = smaller, middle
    return found


def smallest_replicas(found: Sequence[Kind], traffic: Traffic, limits: Limits) -> Plan | None:
    """The replicas with the fewest GPUs that keep the limits, with the best chunk size."""
    best: Plan | None = None
    for kind in found:
        for chunk in CHUNKS:

            def plan(count: int, kind: Kind = kind, chunk: int = chunk) -> Plan | None:
                made = evaluate(Stage(kind, count, chunk), None, traffic)
                return made if made is not None and made.keeps(limits) else None

            most = _most(kind, traffic)
            if best is not None:
                most = min(most, (best.num_gpus - 1) // kind.num_gpus)
            best = _fewest(plan, most) or best
    return best


def check_limits(found: Sequence[Kind], traffic: Traffic, limits: Limits) -> None:
    """Refuse limits that an idle node of the best kind misses.

    Raises:
        ConfigError: names the option, the least possible value, and what lowers it.
    """
    first_s = min(prompt_s(kind.lane, traffic, CHUNKS[-1]) for kind in found)
    step_s = min(kind.lane.profile.decode_base_s + growth_s(kind.lane, traffic) for kind in found)
    answer_s = min(
        prompt_s(kind.lane, traffic, CHUNKS[-1])
        + traffic.gaps * (kind.lane.profile.decode_base_s + growth_s(kind.lane, traffic))
        for kind in found
    )
    for option, limit_s, least_s, less in (
        ("slo-ttft", limits.ttft_s, first_s, "a shorter --prompt or a higher --hit"),
        ("slo-tbt", limits.tbt_s, step_s, "a smaller --model"),
        ("e2e-p99", limits.e2e_s, answer_s, "a shorter --output or a smaller --model"),
    ):
        if limit_s < least_s:
            raise ConfigError(
                f"--{option} {limit_s:g} is impossible: an idle node, the fastest of --parallel, takes "
                f"{least_s:.3g} s; give {1.1 * least_s:.2g} or more, {less}, a faster --gpu or more GPUs a "
                "node (--parallel)",
                key=option.replace("-", "_"),
            )
