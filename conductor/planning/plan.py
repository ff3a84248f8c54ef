"""The planner's decision: one pure function of the fleet, the rules and what it remembers.

It adds at once, since nodes take long to join, and removes late: only what the busiest moment of the last
``hold_s`` did not need. ``spare`` nodes of a role are kept for the loss of one. A role that lacks nodes first
takes those that another role did not need for ``lend_s``: a switch takes a second and keeps the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from moonpool.conductor.fleet.removal import Removable, least_missed
from moonpool.conductor.planning.loads import Need
from moonpool.conductor.planning.window import LONG_S

ADD: Final = "add"
REMOVE: Final = "remove"
SWITCH: Final = "switch"

LEND_S: Final = 60.0
COOLDOWN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """One change. ``node_id``: of a node that is removed or switched; ``to_role``: what it becomes."""

    kind: str
    role: str
    why: str
    node_id: str = ""
    to_role: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Floor and ceiling of the nodes of a role, and those kept for the loss of one."""

    least: int = 1
    most: int = 8
    spare: int = 1

    def clamp(self, nodes: int) -> int:
        return max(self.least, min(nodes, self.most))


@dataclass(frozen=True, slots=True)
class Rules:
    """``steps``: most changes of one round, or half of all nodes where that is more. ``can``: kinds of steps
    that this fleet is able to make.
    """

    bounds: Mapping[str, Bounds]
    attained: float = 0.95  # the fraction of requests that should keep their SLOs
    steps: int = 4
    hold_s: float = 300.0
    lend_s: float = LEND_S  # how long a role must not have needed a node until another role takes it
    cooldown_s: float = COOLDOWN_S  # after a change of a role until one of its nodes is removed or taken
    can: frozenset[str] = frozenset({ADD, REMOVE})


@dataclass(frozen=True, slots=True)
class RoleState:
    """The nodes of one role. ``ready`` serve; ``num_starting`` will. ``need``: by the load alone.
    ``num_fixed``: further ones that serve, and that no provider can remove. ``num_lost``: further ones that
    run, and that cannot be reached. ``switchable``: all that serve and can have the other role.
    ``attained``: fraction of requests within the SLO that this role decides; None: too few requests.
    ``join_s``: how long its last nodes took to join. ``held``: why no node can be added now; empty: it can.
    """

    ready: Sequence[Removable]
    num_starting: int
    need: Need = Need(0, "")
    attained: float | None = None
    join_s: float = 30.0
    held: str = ""
    num_fixed: int = 0
    num_lost: int = 0
    switchable: Sequence[Removable] = ()

    @property
    def num_ready(self) -> int:
        return len(self.ready) + self.num_fixed

    @property
    def num_nodes(self) -> int:
        return self.num_ready + self.num_starting


@dataclass(frozen=True, slots=True)
class Memory:
    """What one round tells the next. ``needs``: (time, nodes) by role; ``changed_s``: of its last step."""

    needs: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
    changed_s: Mapping[str, float] = field(default_factory=dict)
    began_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """``targets``: nodes that each role should have. ``reasons``: a sentence for each role."""

    steps: Sequence[Step] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, int] = field(default_factory=dict)


def plan(roles: Mapping[str, RoleState], rules: Rules, memory: Memory, now_s: float) -> tuple[Plan, Memory]:
    """Decide the next changes. Returns them, and the memory for the next round."""
    memory = replace(memory, began_s=now_s if memory.began_s is None else memory.began_s)
    needs: dict[str, Sequence[tuple[float, int]]] = {}
    wanted: dict[str, tuple[int, str]] = {}
    for role, state in roles.items():
        need = _with_feedback(state, rules, memory, role, now_s)
        recent = [one for one in memory.needs.get(role, ()) if now_s - one[0] <= rules.hold_s]
        needs[role] = [*recent, (now_s, need.nodes)]
        wanted[role] = _target(state, rules, replace(memory, needs=needs), role, need, now_s)
    seen = replace(memory, needs=needs)
    lent = {role: _lendable(state, rules, seen, role, now_s) for role, state in roles.items()}
    steps = _steps(roles, wanted, lent, rules)
    changed = dict(memory.changed_s) | dict.fromkeys(
        [name for step in steps for name in (step.role, step.to_role) if name], now_s
    )
    reasons = {role: why for role, (_, why) in wanted.items()}
    targets = {role: target for role, (target, _) in wanted.items()}
    return Plan(steps, reasons, targets), Memory(needs, changed, memory.began_s)


def _with_feedback(state: RoleState, rules: Rules, memory: Memory, role: str, now_s: float) -> Need:
    """The need by the load, or one node more than there are, where measured attainment contradicts it."""
    need, attained = state.need, state.attained
    if attained is None or attained >= rules.attained or need.nodes > state.num_nodes:
        return need
    # The nodes added last must have served for as long as attainment is measured.
    settled_s = memory.changed_s.get(role, float("-inf")) + state.join_s + LONG_S
    if now_s < settled_s:
        return need
    return Need(
        state.num_ready + 1,
        f"{attained:.0%} of requests keep the SLO, less than {rules.attained:.0%}, though by the load "
        f"{need.nodes} nodes would do",
    )


def _target(
    state: RoleState, rules: Rules, memory: Memory, role: str, need: Need, now_s: float
) -> tuple[int, str]:
    """The number of nodes that a role should have now, and why."""
    bounds, have = rules.bounds[role], state.num_nodes
    up = bounds.clamp(need.nodes + bounds.spare)
    kept = f", and {bounds.spare} for the loss of one" if bounds.spare else ""
    why = f"{need.nodes} needed{kept}: {need.why}"
    if need.nodes + bounds.spare > bounds.most:
        why += f"; at most {bounds.most} are allowed"
    if state.num_lost:
        why += f"; {state.num_lost} that cannot be reached count among the {bounds.most} allowed"
    if up >= have:
        return up, why
    busiest = max(nodes for _, nodes in memory.needs[role])
    down = bounds.clamp(busiest + bounds.spare)
    if down >= have:
        return have, f"{why}; {busiest} were needed within the last {rules.hold_s:g} s"
    if now_s - _began(memory, now_s) < rules.hold_s:
        return have, f"{why}; nothing is removed before {rules.hold_s:g} s were observed"
    if state.num_starting:
        return have, f"{why}; nothing is removed while nodes start"
    if now_s - memory.changed_s.get(role, float("-inf")) < rules.cooldown_s:
        return have, f"{why}; nothing is removed within {rules.cooldown_s:g} s of a change"
    return down, f"{why}; {busiest} were enough for the last {rules.hold_s:g} s"


def idle(state: RoleState, rules: Rules, memory: Memory, role: str, now_s: float) -> int:
    """How many nodes of a role nothing needed for ``lend_s``, beyond its floor and its spare ones; none
    within the cool-down of a change."""
    settled_s = memory.changed_s.get(role, float("-inf")) + rules.cooldown_s
    recent = [nodes for at_s, nodes in memory.needs.get(role, ()) if now_s - at_s <= rules.lend_s]
    if not recent or now_s < max(settled_s, _began(memory, now_s) + rules.lend_s):
        return 0
    bounds = rules.bounds[role]
    return max(state.num_ready - bounds.clamp(max(recent) + bounds.spare), 0)


def _lendable(state: RoleState, rules: Rules, memory: Memory, role: str, now_s: float) -> int:
    """How many of its nodes another role may take now."""
    if SWITCH not in rules.can:
        return 0
    return min(idle(state, rules, memory, role, now_s), len(state.switchable))


def _steps(
    roles: Mapping[str, RoleState],
    wanted: Mapping[str, tuple[int, str]],
    lent: Mapping[str, int],
    rules: Rules,
) -> list[Step]:
    """At most ``rules.steps`` of them: switches first, which are quickest, then additions, then removals."""
    steps: list[Step] = []
    missing: dict[str, int] = {}
    for role, state in roles.items():
        # Those that cannot be reached run, too. Fewer than none: removals.
        room = max(rules.bounds[role].most - state.num_nodes - state.num_lost, 0)
        missing[role] = min(wanted[role][0] - state.num_nodes, room)
    taken: set[str] = set()
    for role in roles:
        for other in roles:
            count = min(missing[role], lent[other]) if role != other else 0
            for node in least_missed(roles[other].switchable)[: max(count, 0)]:
                missing[role] -= 1
                missing[other] += missing[other] < 0
                taken.add(node.node_id)
                steps.append(Step(SWITCH, other, wanted[role][1], node.node_id, role))
    for role, state in roles.items():
        if ADD in rules.can and not state.held:
            steps += [Step(ADD, role, wanted[role][1]) for _ in range(max(missing[role], 0))]
    for role, state in roles.items():
        stay = [node for node in state.ready if node.node_id not in taken]
        for node in least_missed(stay)[: max(-missing[role], 0)] if REMOVE in rules.can else ():
            steps.append(Step(REMOVE, role, wanted[role][1], node.node_id))
    return steps[: max(rules.steps, sum(state.num_nodes for state in roles.values()) // 2)]


def _began(memory: Memory, now_s: float) -> float:
    return now_s if memory.began_s is None else memory.began_s
