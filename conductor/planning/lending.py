"""Which nodes change their model. Pure: a model lends what it did not need to one that lacks nodes.

Adding comes first: only a model for which no node can be started borrows. What is idle was not needed for a
while (see ``plan.idle``), beyond the floor and the spare nodes of the model that has it. After a
change of its nodes a model lends none before its cool-down is over, so that no node goes to and fro.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.conductor.fleet.removal import Removable, least_missed


@dataclass(frozen=True, slots=True)
class OwnNode:
    """A node that serves and may change its model. ``stages``: those that requests are placed on it for."""

    node: Removable
    stages: Sequence[str]


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model, as its planner saw it last.

    ``lacks``: the stages that should have more nodes than there are, and why; ``starved``: those of them for
    which none can be started, and why not. ``idle``: nodes by stage that nothing needed. ``refused``: nodes
    that did not start with this model.
    """

    name: str
    lacks: Mapping[str, str] = field(default_factory=dict)
    starved: Mapping[str, str] = field(default_factory=dict)
    idle: Mapping[str, int] = field(default_factory=dict)
    nodes: Sequence[OwnNode] = ()
    refused: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Loan:
    """A node that leaves ``lender`` and serves ``borrower`` from then on. ``stages``: of the node."""

    node_id: str
    stages: Sequence[str]
    lender: str
    borrower: str
    why: str


def lend(models: Sequence[ModelState]) -> list[Loan]:
    """At most one loan to each model; the next round sees what it changed. The model with the most idle nodes
    lends, of those the one with the cached blocks that are missed least."""
    idle = {model.name: dict(model.idle) for model in models}
    loans: list[Loan] = []
    for borrower in models:
        loan = next(
            (
                found
                for stage, why in borrower.starved.items()
                if (found := _loan(borrower, stage, why, models, idle, {one.node_id for one in loans}))
            ),
            None,
        )
        if loan is not None:
            loans.append(loan)
            for stage in loan.stages:
                idle[loan.lender][stage] -= 1
    return loans


def _loan(
    borrower: ModelState,
    stage: str,
    why: str,
    models: Sequence[ModelState],
    idle: Mapping[str, Mapping[str, int]],
    taken: Collection[str],
) -> Loan | None:
    # A model that lacks nodes itself has others for what is idle: it changes their role.
    lenders = [one for one in models if one.name != borrower.name and not one.lacks]
    for lender in sorted(lenders, key=lambda one: -idle[one.name].get(stage, 0)):
        left = idle[lender.name]
        able = {
            own.node.node_id: own
            for own in lender.nodes
            if stage in own.stages
            and all(left.get(each, 0) > 0 for each in own.stages)
            and own.node.node_id not in (*taken, *borrower.refused)
        }
        if able:
            chosen = able[least_missed([own.node for own in able.values()])[0].node_id]
            text = (
                f"{borrower.name} lacks a {stage} node ({borrower.lacks.get(stage, why)}) and none can be "
                f"started ({why}); {lender.name} did not need {left[stage]} of its own"
            )
            return Loan(chosen.node.node_id, chosen.stages, lender.name, borrower.name, text)
    return None
