"""Nodes that go from one model to another: what the models' planners saw, compared, and carried out.

Only the conductor with the planners' lease lends, which all models of a cluster share; and only between
models with planners that act. What is stranded is counted by every conductor, with or without planners.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.conductor.fleet.administration import FleetAdmin
from moonpool.conductor.fleet.errors import FleetUnchanged, NodeMissing, ProviderFailed
from moonpool.conductor.fleet.providers.provider import REFUSED, RUNNING
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.observing import planner_metrics as metrics
from moonpool.conductor.planning.lease import PlannerLease
from moonpool.conductor.planning.lending import Loan, ModelState, OwnNode, lend
from moonpool.conductor.planning.planner import ACT, ADVISE, PERIOD_S, Look, Planner
from moonpool.kvstore.index.redis.node_record import stages_of
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

# After a loan that was refused or failed, until the same model borrows again.
_PAUSE_S = 15.0


@dataclass(frozen=True, slots=True)
class Borrower:
    """One model, which lends too. ``in_flight``: its requests in this conductor."""

    name: str
    planner: Planner
    fleet: FleetAdmin
    registry: NodeRegistry
    in_flight: Callable[[], int]


class Arbiter:
    """Of all models of a conductor. ``status`` by model: plain JSON types, for people."""

    def __init__(
        self,
        models: Sequence[Borrower],
        lease: PlannerLease,
        *,
        clock: Callable[[], float],
        on_decision: Callable[[str, str, str], None],
    ) -> None:
        """``on_decision``: as of ``Planner``."""
        self._models = {one.name: one for one in models}
        self._lease = lease
        self._clock = clock
        self._on_decision = on_decision
        self._since_s: float | None = None
        self._stranded_s = dict.fromkeys(self._models, 0.0)
        self._fresh_s: dict[str, float] = {}  # a look before this does not know the last loan
        self._advised: set[tuple[str, str]] = set()
        self._task: asyncio.Task[None] | None = None
        self.status: dict[str, dict[str, Any]] = {name: {} for name in self._models}

    def start(self) -> None:
        self._task = restarted(self._run, "lending between models")

    async def close(self) -> None:
        """Idempotent."""
        await cancel_and_wait(self._task)

    async def _run(self) -> None:
        while True:
            await self.round()
            await asyncio.sleep(PERIOD_S)

    async def round(self) -> None:
        """Count what is stranded, and lend if this conductor has the planners' lease."""
        now_s = self._clock()
        self._count_stranded(now_s)
        looks = {
            name: look
            for name, one in self._models.items()
            if (look := one.planner.look) is not None and look.at_s > self._fresh_s.get(name, float("-inf"))
        }
        loans = lend([self._state(self._models[name], look, now_s) for name, look in looks.items()])
        would = {(loan.node_id, loan.borrower) for loan in loans}
        for name, one in self._models.items():
            if self.status[name].get("loan", "").startswith("would "):  # advice holds for a round
                del self.status[name]["loan"], one.planner.status["loan"]
        for loan in loans:
            sides = [self._models[name].planner for name in (loan.lender, loan.borrower)]
            acts = all(planner.mode == ACT for planner in sides)
            text = f"{'' if acts else 'would '}lend {loan.node_id} to {loan.borrower}: {loan.why}"
            if acts:
                self._on_decision("plan", loan.node_id, text)
                await self._carry_out(loan, looks[loan.lender].epoch, now_s)
            elif (loan.node_id, loan.borrower) not in self._advised:
                self._on_decision("plan", loan.node_id, text)
                metrics.steps.labels("lend", "/".join(loan.stages), "advised").inc()
            self.status[loan.borrower]["loan"] = self._models[loan.borrower].planner.status["loan"] = text
        self._advised = would

    def _state(self, one: Borrower, look: Look, now_s: float) -> ModelState:
        planner = one.planner
        lacks = {
            stage: look.plan.reasons[stage]
            for stage, state in look.roles.items()
            if look.plan.targets[stage] > state.num_nodes
        }
        # A planner that only advises starts no node, so that none was ever refused.
        unknown = "if the provider refuses one" if planner.mode == ADVISE else ""
        starved = {stage: why for stage in lacks if (why := planner.cannot_add(look.roles[stage]) or unknown)}
        serving: dict[str, bool] = {}
        for member in one.registry.members.values():
            serving[member.owner] = serving.get(member.owner, True) and member.available(now_s)
        nodes = [
            OwnNode(one.fleet.removable(node.node_id), stages)
            for node in look.supplied
            if node.state == RUNNING and serving.get(node.node_id) and (stages := stages_of(node.role))
        ]
        refused = {node.node_id for node in look.supplied if node.state == REFUSED}
        idle = {stage: planner.idle(stage, look, now_s) for stage in look.roles}
        return ModelState(one.name, lacks, starved, idle, nodes, refused)

    async def _carry_out(self, loan: Loan, epoch: int, now_s: float) -> None:
        lender, borrower = self._models[loan.lender], self._models[loan.borrower]
        outcome, fresh_s = "made", now_s
        if not self._lease.holds(epoch):
            outcome = "abandoned"
        else:
            try:
                await lender.fleet.lend(loan.node_id, loan.borrower, loan.why, fence=epoch)
                self._lease.accepted(epoch, lender.fleet.provider)
                for one in (lender, borrower):
                    one.planner.changed(loan.stages, now_s)
            except (FleetUnchanged, NodeMissing, ProviderFailed) as error:
                outcome = "failed" if isinstance(error, ProviderFailed) else "refused"
                fresh_s += _PAUSE_S
                if isinstance(error, ProviderFailed):
                    self._lease.refused(error, lender.fleet.provider)
                log.warning("%s was not lent to %s: %s", loan.node_id, loan.borrower, error)
        self._fresh_s |= {loan.lender: now_s, loan.borrower: fresh_s}
        metrics.steps.labels("lend", "/".join(loan.stages), outcome).inc()

    def _count_stranded(self, now_s: float) -> None:
        """Nodes without a request, of one model, while another one lacks nodes."""
        passed_s = now_s - self._since_s if self._since_s is not None else 0.0
        self._since_s = now_s
        queues = {name: _queues(one) for name, one in self._models.items()}
        for name, one in self._models.items():
            num_idle = _num_idle(one, now_s)
            if any(does for other, does in queues.items() if other != name):
                self._stranded_s[name] += num_idle * passed_s
                metrics.stranded.labels(name).inc(num_idle * passed_s)
            self.status[name] |= {
                "num_idle": num_idle,
                "queues": queues[name],
                "stranded_node_s": round(self._stranded_s[name], 1),
            }


def _queues(one: Borrower) -> bool:
    """Whether requests of the model lack nodes: the load needs more than serve."""
    seen = one.planner.seen
    lacks = seen is not None and any(state.need.nodes > state.num_ready for state in seen.roles.values())
    return lacks and one.in_flight() > 0


def _num_idle(one: Borrower, now_s: float) -> int:
    """Its nodes that serve, and have no request."""
    busy: dict[str, bool] = {}
    for member in one.registry.members.values():
        load = member.record.load
        works = load.num_running + load.num_waiting + member.view.num_running > 0
        busy[member.owner] = busy.get(member.owner, False) or works or not member.available(now_s)
    return sum(not works for works in busy.values())
