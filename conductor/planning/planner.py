"""The planner in a conductor: look, decide, and in mode ``act`` change the fleet while the lease holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from moonpool.conductor.fleet.administration import FleetAdmin, can_become
from moonpool.conductor.fleet.errors import FleetUnchanged, NodeMissing, ProviderFailed
from moonpool.conductor.fleet.providers.provider import SuppliedNode
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.observing import planner_metrics as metrics
from moonpool.conductor.observing.demand import Demand
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.lease import Held, PlannerLease
from moonpool.conductor.planning.observation import Nodes, Observation, observe
from moonpool.conductor.planning.plan import (
    ADD,
    COOLDOWN_S,
    LEND_S,
    REMOVE,
    SWITCH,
    Bounds,
    Memory,
    Plan,
    RoleState,
    Rules,
    Step,
    idle,
    plan,
)
from moonpool.conductor.planning.role_figures import join_phases, kv_free, longest_join_s, queue_s
from moonpool.conductor.planning.supply import Supply
from moonpool.conductor.planning.window import DemandWindow
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.node_record import ROLES, STAGES, stages_of
from moonpool.runtime.config.options import PlannerOptions
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

OFF, ADVISE, ACT = "off", "advise", "act"
PERIOD_S = 2.0


@dataclass(frozen=True, slots=True)
class Look:
    """A round of the planner that leads: what it saw and decided. ``epoch``: of its lease."""

    at_s: float
    epoch: int
    roles: Mapping[str, RoleState]
    plan: Plan
    supplied: Sequence[SuppliedNode]


class Planner:
    """Looks every ``period_s`` at the fleet and its demand. ``status``: for people, plain JSON types."""

    def __init__(
        self,
        registry: NodeRegistry,
        admin: FleetAdmin,
        lease: PlannerLease,
        demand: Callable[[], Demand],
        *,
        mode: str,
        rules: Rules,
        slo: Slo,
        clock: Callable[[], float],
        on_decision: Callable[[str, str, str], None],
        period_s: float = PERIOD_S,
        stands_back: Callable[[], bool] = lambda: False,
    ) -> None:
        """``stands_back``: whether nodes are left as they are. ``demand``: totals of all conductors.
        ``on_decision``: called with ``plan``, node or role, and a sentence for each new decision.
        """
        self.status: dict[str, Any] = {"mode": mode, "state": "not started", "roles": {}, "steps": []}
        self._registry = registry
        self._admin = admin
        self._lease = lease
        self._demand = demand
        self.mode = mode
        self.seen: Observation | None = None  # in the last round
        self.look: Look | None = None  # of the last round; None: this conductor did not plan in it
        self._rules = rules
        self._slo = slo
        self._clock = clock
        self._on_decision = on_decision
        self._period_s = period_s
        self._stands_back = stands_back
        self._window = DemandWindow()
        self._memory = Memory()
        self._supplies = {role: Supply() for role in STAGES}
        self._advised: Sequence[Step] = ()
        self._task: asyncio.Task[None] | None = None

    def idle(self, role: str, look: Look, now_s: float) -> int:
        """How many nodes of a role nothing needed for a while; see ``plan.idle``."""
        return idle(look.roles[role], self._rules, self._memory, role, now_s)

    def cannot_add(self, state: RoleState) -> str:
        """Why no node of a role can be started now; empty: one can."""
        return state.held if ADD in self._rules.can else "no provider starts nodes"

    def changed(self, roles: Iterable[str], now_s: float) -> None:
        """A node of these roles came from another model, or went there: their cool-down begins."""
        changed_s = dict(self._memory.changed_s) | dict.fromkeys(roles, now_s)
        self._memory = replace(self._memory, changed_s=changed_s)

    def start(self) -> None:
        self._task = restarted(self._run, "planner")

    async def close(self) -> None:
        """Give the lease back. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_and_wait(task)
        if self.mode != OFF:
            try:
                await self._lease.leave()
            except IndexUnavailable as error:
                log.info("the planner's lease ends by itself: %s", error)

    async def _run(self) -> None:
        while True:
            await self.round()
            await asyncio.sleep(self._period_s)

    async def round(self) -> None:
        """Look once and, if this conductor has the lease, decide once."""
        now_s = self._clock()
        self._window.add(now_s, self._demand())
        held = await self._leads()
        supplied: Sequence[SuppliedNode] = ()
        try:
            if held.epoch:
                supplied = await self._admin.supplied()
        except ProviderFailed as error:
            # Without its list, nodes on their way would be asked for a second time.
            self.status["state"] = f"paused: {error}"
            held = Held("")
        seen = self.seen = await self._observe(supplied, held, now_s)
        self._show(seen, now_s)
        self.look = None
        if not held.epoch:
            # Whoever plans next begins anew: what this conductor remembers is not what the fleet does.
            self._memory, self._advised = Memory(), ()
            return
        if self._stands_back():
            self.status["state"] = "asleep until a first request has its nodes (planner.min_warm=0)"
            self._memory, self._advised = Memory(), ()
            return
        before_s = self._memory.changed_s
        decided, memory = plan(seen.roles, self._rules, self._memory, now_s)
        acts = self.mode == ACT
        # Advice changes nothing, so nothing has to settle after it.
        self._memory = memory if acts else replace(memory, changed_s=self._memory.changed_s)
        self._tell(decided)
        self.look = Look(now_s, held.epoch, seen.roles, decided, supplied)
        if acts:
            for role in await self._carry_out(decided.steps, held.epoch):
                # The provider's pause follows, but nothing has to settle.
                changed_s = {**self._memory.changed_s, role: before_s.get(role, float("-inf"))}
                self._memory = replace(self._memory, changed_s=changed_s)

    async def _leads(self) -> Held:
        if self.mode == OFF:
            self.status["state"] = "off (planner.mode)"
            return Held("")
        try:
            held = await self._lease.take()
        except IndexUnavailable as error:
            self.status["state"] = f"paused: Redis does not answer ({error})"
            metrics.leads.set(0)
            return Held("")
        metrics.leads.set(held.epoch > 0)
        self.status["state"] = f"plans, epoch {held.epoch}" if held.epoch else f"{held.holder} plans"
        return held

    async def _observe(self, supplied: Sequence[SuppliedNode], held: Held, now_s: float) -> Observation:
        nodes = {role: await self._nodes(role, supplied, held, now_s) for role in STAGES}
        return observe(
            nodes["prefill"], nodes["decode"], self._window, self._slo, self._rules.attained, now_s
        )

    async def _nodes(self, role: str, supplied: Sequence[SuppliedNode], held: Held, now_s: float) -> Nodes:
        # A node of both roles serves this one too; the planner neither adds nor removes such nodes.
        members = [one for one in self._registry.members.values() if role in stages_of(one.record.role)]
        refused = {one.owner: why for one in members if (why := self._registry.incompatible(one.record))}
        serving = {one.owner for one in members if one.available(now_s) or one.warming} - refused.keys()
        own = [node for node in supplied if node.role == role]
        join_s = longest_join_s(members)
        supply = self._supplies[role]
        joined = {one.owner for one in members}
        # Those that a rollout keeps from requests are no reason to ask for others, and those that drain go.
        kept_back = {one.owner for one in members if one.gated or one.record.state == "draining"}
        unreached = joined - serving - kept_back - refused.keys()
        expected, gives_up = list[str](), dict[str, str]()
        if held.epoch:  # else nothing was listed, which does not mean that there is nothing
            expected, gives_up = supply.look(own, joined, join_s, now_s, refused, unreached)
        if held.epoch and self.mode == ACT:
            for node_id, why in gives_up.items():
                try:
                    await self._admin.stop(node_id, why, fence=held.epoch)
                    self._lease.accepted(held.epoch, self._admin.provider)
                    metrics.given_up.labels(role).inc()
                except ProviderFailed as error:
                    self._lease.refused(error, self._admin.provider)
                    log.warning("%s was given up, and could not be stopped: %s", node_id, error)
                    supply.still_runs(node_id, why, now_s)
        removable = {node.node_id for node in own if node.counts and node.can_stop} & serving
        state = RoleState(
            [self._admin.removable(name) for name in sorted(removable)],
            len(expected),
            join_s=join_s,
            held=supply.held(now_s),
            num_fixed=len(serving - removable),
            num_lost=sum(node.counts and node.node_id in supply.lost for node in own),
            switchable=[
                self._admin.removable(name) for name in sorted(serving) if self._can_switch(name, role)
            ],
        )
        return Nodes(self._registry.fleet(role), state)

    def _can_switch(self, node_id: str, role: str) -> bool:
        """Whether a node of ``role`` alone, all of its replicas, can have the other role."""
        (other,) = set(STAGES) - {role}
        records = [one.record for one in self._registry.members.values() if one.owner == node_id]
        return all(one.role == role and can_become(one, other) for one in records)

    # ------------------------------------------------------------------ decisions

    async def _carry_out(self, steps: Sequence[Step], epoch: int) -> set[str]:
        """Returns the roles in which nothing was changed, because the provider starts no node."""
        without, made = set[str](), set[str]()
        for position, step in enumerate(steps):
            if not self._lease.holds(epoch):
                log.warning(
                    "the lease ended before %d of %d changes were made", len(steps) - position, len(steps)
                )
                for left in steps[position:]:
                    metrics.steps.labels(left.kind, left.role, "abandoned").inc()
                break
            if step.kind == ADD and step.role in without:
                metrics.steps.labels(step.kind, step.role, "abandoned").inc()
                continue
            outcome = "made"
            try:
                if step.kind == ADD:
                    await self._admin.start(step.role, step.why, fence=epoch)
                elif step.kind == REMOVE:
                    await self._admin.stop(step.node_id, step.why, fence=epoch)
                else:
                    await self._admin.switch(step.node_id, step.to_role, step.why)
                if step.kind != SWITCH:
                    self._lease.accepted(epoch, self._admin.provider)
                made |= {step.role, step.to_role}
            except (FleetUnchanged, NodeMissing) as error:
                outcome = "refused"
                log.warning("a change was not made: %s", error)
            except ProviderFailed as error:
                outcome = "failed"
                self._lease.refused(error, self._admin.provider)
                if step.kind == ADD:
                    without.add(step.role)
                if step.kind != SWITCH:
                    self._supplies[step.role].failed(str(error), self._clock())
                log.warning("a change was not made: %s", error)
            metrics.steps.labels(step.kind, step.role, outcome).inc()
        return without - made

    def _tell(self, decided: Plan) -> None:
        """Say a decision once, not in each round in which it stands."""
        self.status["steps"] = [asdict(step) for step in decided.steps]
        for role, reason in decided.reasons.items():
            self.status["roles"][role] |= {"target": decided.targets[role], "reason": reason}
            metrics.targets.labels(self._admin.model, role).set(decided.targets[role])
        kinds = [(step.kind, step.role, step.node_id) for step in decided.steps]
        before = [(step.kind, step.role, step.node_id) for step in self._advised]
        self._advised = decided.steps
        if not kinds or (self.mode == ADVISE and kinds == before):
            return
        for step in decided.steps:
            would = "" if self.mode == ACT else "would "
            what = f"{would}{step.kind} {step.node_id or f'a {step.role} node'}"
            if step.to_role:
                what += f" to {step.to_role}"
            self._on_decision("plan", step.node_id or step.role, f"{what}: {step.why}")
            if would:
                metrics.steps.labels(step.kind, step.role, "advised").inc()

    def _show(self, seen: Observation, now_s: float) -> None:
        members = self._registry.members.values()
        for role, state in seen.roles.items():
            attained = state.attained
            metrics.needed.labels(self._admin.model, role).set(state.need.nodes)
            metrics.attained.labels(self._admin.model, role).set(1.0 if attained is None else attained)
            metrics.join_seconds.labels(self._admin.model, role).set(state.join_s)
            join = join_phases(one for one in members if one.record.role == role)
            for phase, seconds in join.items():
                metrics.join_phase_seconds.labels(self._admin.model, role, phase).set(seconds)
            self.status["roles"][role] = {
                "ready": state.num_ready,
                "starting": state.num_starting,
                "needed": state.need.nodes,
                "why": state.need.why,
                "held": state.held,
                "attained": attained,
                "join_s": state.join_s,
                "join": join,
            }
        for role in ROLES:
            metrics.queue_seconds.labels(self._admin.model, role).set(queue_s(members, role, now_s))
            metrics.kv_free.labels(self._admin.model, role).set(kv_free(members, role))
        self.status["recent"] = asdict(seen.recent)


def rules_of(options: PlannerOptions, *, supplies: bool) -> Rules:
    """The rules that the options describe. ``supplies``: whether a provider adds and removes nodes."""
    bounds = {
        "prefill": Bounds(options.prefill_least, options.prefill_most, options.spare),
        "decode": Bounds(options.decode_least, options.decode_most, options.spare),
    }
    can = frozenset({ADD, REMOVE, SWITCH} if supplies else {SWITCH})
    cooldown_s, lend_s = (min(default_s, options.hold_s) for default_s in (COOLDOWN_S, LEND_S))
    return Rules(
        bounds,
        attained=options.attained,
        hold_s=options.hold_s,
        lend_s=lend_s,
        cooldown_s=cooldown_s,
        can=can,
    )
