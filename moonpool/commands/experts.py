"""``moonpool experts``: the load of a node's MoE experts, and a placement with copies of the hot ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.table import Table

from moonpool.client import Client
from moonpool.commands.options import console, output_option, run_with_client, url_option
from moonpool.conductor.observing.replica_groups import holders
from moonpool.engine.sharding.expert_placement import ExpertPlacement, plan_experts, skew
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc

_TIMEOUT_S = 10.0
# Each rank reads its experts of every layer that changes.
_PLACE_S = 600.0


@dataclass(frozen=True, slots=True)
class Measured:
    """rows: [num_layers, num_experts], summed over the node's replicas since the node started."""

    rows: npt.NDArray[np.int64]
    num_ranks: int
    rank_skew: float  # with the current placement


@click.command("experts")
@click.argument("node", metavar="NODE")
@click.option(
    "--copies",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Copies of hot experts, a layer.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=2),
    metavar="N",
    help="Ranks to plan for (engine.parallel.ep); default: as many as NODE has.",
)
@output_option(help="Write the plan there.")
@click.option("--apply", is_flag=True, help="Move NODE's experts by the plan while it serves.")
@url_option
def experts_command(
    node: str, copies: int, ranks: int | None, output: Path | None, apply: bool, url: str
) -> None:
    """Print the load of NODE's experts since it started, and plan a placement with copies of the hot ones.

    Nodes that are started with engine.parallel.expert_plan_path=FILE use the plan from the start. --apply: so
    does NODE when it is started again, with the same model and plan of ranks.
    """
    measured = run_with_client(url, lambda client: measure(client, node))
    if ranks is None and output is not None and measured.num_ranks == 1:
        raise click.ClickException(
            f"{node} has its experts on one rank: set the ranks to plan for with --ranks N"
        )
    if apply and ranks not in (None, measured.num_ranks):
        raise click.ClickException(f"{node} has {measured.num_ranks} ranks: leave out --ranks, or --apply")
    plan = plan_experts(measured.rows, ranks or measured.num_ranks, copies)
    _show(node, measured, plan, copies)
    if output is not None:
        output.write_text(plan.to_json())
        console.print(
            f"{output} is written: start nodes with --set engine.parallel.ep={plan.num_ranks} "
            f"--set engine.parallel.expert_plan_path={output}"
        )
    if apply:
        changed, not_kept = run_with_client(url, lambda client: place(client, node, plan))
        console.print(f"{node}: the experts of {changed} layers were moved: plan {plan.digest}")
        if not_kept:
            console.print(f"{node} begins without this plan when it is started again: {not_kept}")


async def measure(client: Client, node_id: str) -> Measured:
    """Ask the node for its load. Raises ClickException: unknown node, or no load to plan by."""
    replies = [await _ask(one) for one in await _replicas(client, node_id)]
    rows = sum(np.array(reply.rows, np.int64).reshape(reply.num_layers, -1) for reply in replies)
    assert isinstance(rows, np.ndarray)
    if not rows.shape[1]:
        raise click.ClickException(f"the model of {node_id} has no experts")
    if not rows.any():
        raise click.ClickException(f"{node_id} has computed nothing yet: send it requests, then ask again")
    return Measured(rows, replies[0].num_ranks, float(np.mean([reply.skew for reply in replies])))


async def _replicas(client: Client, node_id: str) -> list[dict[str, Any]]:
    nodes = (await client.cluster())["nodes"]
    found = [node for node in nodes if node["node_id"] == node_id]
    if not found:
        names = ", ".join(node["node_id"] for node in nodes if node["role"] != "store")
        there = f"there are: {names}" if names else "no node has joined yet"
        raise click.ClickException(f"there is no node {node_id} in the cluster; {there}")
    return list(holders(found[0]))


async def place(client: Client, node_id: str, plan: ExpertPlacement) -> tuple[int, str]:
    """Have all replicas of the node move their experts; returns how many layers changed, of all of them, and
    why a restart begins without the plan, if it does. Raises ClickException: unknown node."""
    changed, not_kept = 0, ""
    for one in await _replicas(client, node_id):
        async with rpc.channel(one["rpc_address"]) as channel:
            with rpc.node_errors(one["node_id"]):
                reply = await node_pb2_grpc.ExpertsStub(channel).Place(
                    node_pb2.PlaceExpertsRequest(placement=plan.to_json()), timeout=_PLACE_S
                )
        changed += reply.num_layers
        not_kept = not_kept or reply.not_kept
    return changed, not_kept


async def _ask(node: dict[str, Any]) -> node_pb2.ExpertLoadReply:
    async with rpc.channel(node["rpc_address"]) as channel:
        with rpc.node_errors(node["node_id"]):
            reply: node_pb2.ExpertLoadReply = await node_pb2_grpc.ExpertsStub(channel).Load(
                node_pb2.ExpertLoadRequest(), timeout=_TIMEOUT_S
            )
    return reply


def _show(node_id: str, measured: Measured, plan: ExpertPlacement, copies: int) -> None:
    rows, of_layers = measured.rows, skew(measured.rows)
    table = Table(title=f"experts of {node_id}", title_justify="left", show_header=False, box=None)
    table.add_row("rows", f"{rows.sum():,}")
    table.add_row("busiest expert over mean", f"{of_layers.mean():.2f}, worst layer {of_layers.max():.2f}")
    if measured.num_ranks > 1:
        table.add_row(
            f"busiest of {measured.num_ranks} ranks over mean, current placement", f"{measured.rank_skew:.2f}"
        )
    deal = ExpertPlacement.even(len(rows), rows.shape[1], plan.num_ranks)
    table.add_row(f"distributed evenly over {plan.num_ranks} ranks", f"{deal.skew(rows):.2f}")
    table.add_row(f"by this plan, {copies} copies a layer", f"{plan.skew(rows):.2f}")
    console.print(table)
