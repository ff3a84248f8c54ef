"""The answer of ``moonpool plan`` for a workload: both clusters, their checks, and what changes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.hardware import Accelerator, ModelShape
from moonpool.simulator.sizing.check import Check, check
from moonpool.simulator.sizing.search import (
    Plan,
    check_limits,
    evaluate,
    kinds,
    smallest_replicas,
    smallest_split,
    with_link,
)
from moonpool.simulator.sizing.stages import Kind, Stage
from moonpool.simulator.sizing.traffic import Limits, Traffic

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Question:
    """``users``: wait for an answer, pause for ``think_s``, and ask again; 0: ``traffic`` has the rate."""

    gpu: Accelerator
    model: ModelShape
    sizes: Sequence[int]  # GPUs that a node may have
    traffic: Traffic
    limits: Limits
    users: int = 0
    think_s: float = 0.0

    def kinds(self) -> list[Kind]:
        return with_link(kinds(self.gpu, self.model, self.sizes), self.gpu.network_nbytes_per_s)


@dataclass(frozen=True, slots=True)
class Sized:
    """The smallest clusters by formula. None: nothing of the kind keeps the limits."""

    traffic: Traffic
    split: Plan | None
    replicas: Plan | None

    @property
    def plans(self) -> list[Plan]:
        """The one with fewer GPUs first."""
        found = [plan for plan in (self.replicas, self.split) if plan is not None]
        return sorted(found, key=lambda plan: plan.num_gpus)


@dataclass(frozen=True, slots=True)
class Change:
    """What a change does: to the plan's cluster as it is, and to the GPUs needed."""

    name: str
    e2e_p99_s: float | None  # None: it does not keep up
    keeps: bool
    num_gpus: int | None  # None: the change is of the cluster, or nothing keeps the limits


def size(question: Question) -> Sized:
    """Find both clusters by formula.

    Users ask at the rate ``users / (think + answer)`` (the response time law), so a faster cluster gets more
    requests: the rate is raised until it is at least that of its own answers.

    Raises:
        ConfigError: no cluster keeps the limits.
    """
    traffic, limits, found = question.traffic, question.limits, question.kinds()
    check_limits(found, traffic, limits)
    if question.users:
        slowest_s = question.think_s + limits.answer_s(traffic.gaps)
        traffic = replace(traffic, rate=question.users / slowest_s)
    for _ in range(_ROUNDS):
        sized = Sized(
            traffic, smallest_split(found, traffic, limits), smallest_replicas(found, traffic, limits)
        )
        if not sized.plans:
            raise ConfigError(
                "no number of nodes keeps these limits under any load: they are met by an idle node, but a "
                "batch, a hand-over or the memory is not in them; raise the limit by a tenth, or add GPUs a "
                "node (--parallel)",
                key="e2e_p99",
            )
        if not question.users:
            break
        rate = question.users / (question.think_s + sized.plans[0].e2e.mean_s)
        if rate <= traffic.rate * 1.001:
            break
        traffic = replace(traffic, rate=rate)
    return sized


def checks(question: Question, sized: Sized, seed: int, say: Callable[[str], None]) -> dict[str, Check]:
    """Simulate both clusters on the same arrivals' process, policy and chunk sizes; by ``Plan.name``."""
    return {
        plan.name: check(plan, sized.traffic, question.limits, seed, say) for plan in reversed(sized.plans)
    }


def sensitivity(question: Question, sized: Sized) -> list[Change]:
    """The smaller cluster under a fifth more and less load, with a node fewer, and with half the link."""
    plan, traffic = sized.plans[0], sized.traffic
    changes = [
        _change(question, plan, f"load {percent:+d} %", traffic.times(1 + percent / 100))
        for percent in (20, -20)
    ]
    for name, first, then in _without_a_node(plan):
        found = (
            evaluate(first, then, traffic) if min(first.num_nodes, then.num_nodes if then else 1) else None
        )
        changes.append(_of_cluster(name, found, question.limits, None))
    slower = replace(question, gpu=replace(question.gpu, network_nbytes_per_s=_link(question) / 2))
    changes.append(_change(slower, _linked(plan, _link(slower)), "link / 2", traffic))
    return changes


def _link(question: Question) -> float:
    return question.gpu.network_nbytes_per_s


def _linked(plan: Plan, nbytes_per_s: float) -> Plan:
    def linked(stage: Stage) -> Stage:
        (kind,) = with_link([stage.kind], nbytes_per_s)
        return replace(stage, kind=kind)

    return replace(plan, prefill=linked(plan.prefill), decode=linked(plan.decode) if plan.decode else None)


def _without_a_node(plan: Plan) -> Iterator[tuple[str, Stage, Stage | None]]:
    first, then = plan.prefill, plan.decode
    fewer = replace(first, num_nodes=first.num_nodes - 1)
    if then is None:
        yield "1 replica fewer", fewer, None
        return
    yield "1 prefill node fewer", fewer, then
    yield "1 decode node fewer", first, replace(then, num_nodes=then.num_nodes - 1)


def _change(question: Question, plan: Plan, name: str, traffic: Traffic) -> Change:
    limits, least = question.limits, smallest_split if plan.decode else smallest_replicas
    needed = least(question.kinds(), traffic, limits)
    here = evaluate(plan.prefill, plan.decode, traffic)
    return _of_cluster(name, here, limits, needed.num_gpus if needed else None)


def _of_cluster(name: str, here: Plan | None, limits: Limits, num_gpus: int | None) -> Change:
    keeps = here is not None and here.keeps(limits)
    return Change(name, here.e2e.p99_s if here else None, keeps, num_gpus)


def by_kind(question: Question, sized: Sized) -> list[tuple[str, list[int | None]]]:
    """GPUs by kind of node: of a phase beside the plan's other phase, and of replicas alone."""
    traffic, limits, split = sized.traffic, question.limits, sized.split
    rows: list[tuple[str, list[int | None]]] = []
    for kind in question.kinds():
        alone = smallest_replicas([kind], traffic, limits)
        phases = [None, None] if split is None else _phases(split, kind, traffic, limits)
        rows.append((kind.name, [*phases, alone.num_gpus if alone else None]))
    return rows


def _phases(plan: Plan, kind: Kind, traffic: Traffic, limits: Limits) -> list[int | None]:
    first, then = plan.prefill, plan.decode
    assert then is not None
    return [
        _least(first, kind, lambda stage: evaluate(stage, then, traffic), limits),
        _least(then, kind, lambda stage: evaluate(first, stage, traffic), limits),
    ]


def _least(stage: Stage, kind: Kind, plan: Callable[[Stage], Plan | None], limits: Limits) -> int | None:
    """The fewest GPUs of ``kind`` instead of the stage's; up to eight times as many."""

    def keeps(count: int) -> bool:
        made = plan(replace(stage, kind=kind, num_nodes=count))
        return made is not None and made.keeps(limits)

    low, high = 0, math.ceil(8 * stage.num_gpus / kind.num_gpus)
    if not keeps(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high * kind.num_gpus
