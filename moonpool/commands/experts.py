"""``moonpool experts``: how evenly a node's experts are used, and a plan that copies the hot ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from moonpool.client import Client
from moonpool.conductor.observing.replica_groups import holders
from moonpool.engine.experts.load import skew
from moonpool.engine.sharding.expert_placement import ExpertPlan, plan_experts
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Measured:
    """rows: [num_layers, num_experts], since the node's life began, of all its replicas."""

    rows: npt.NDArray[np.int64]
    num_ranks: int
    rank_skew: float  # as the experts lie now


async def measure(client: Client, node_id: str) -> Measured:
    """Ask the node itself. Raises ClickException where it is not in the cluster, or has nothing to tell."""
    nodes = (await client.cluster())["nodes"]
    found = [node for node in nodes if node["node_id"] == node_id]
    if not found:
        names = ", ".join(node["node_id"] for node in nodes if node["role"] in ("prefill", "decode"))
        raise click.ClickException(f"there is no node {node_id} in the cluster; there are: {names}")
    replies = [await _ask(one) for one in holders(found[0])]
    rows = sum(np.array(reply.rows, np.int64).reshape(reply.num_layers, -1) for reply in replies)
    assert isinstance(rows, np.ndarray)
    if not rows.shape[1]:
        raise click.ClickException(f"the model of {node_id} has no experts")
    if not rows.any():
        raise click.ClickException(f"{node_id} has computed nothing yet: send it requests, then ask again")
    return Measured(rows, replies[0].num_ranks, float(np.mean([reply.skew for reply in replies])))


async def _ask(node: dict[str, Any]) -> node_pb2.ExpertLoadReply:
    async with rpc.channel(node["rpc_address"]) as channel:
        with rpc.calling(node["node_id"]):
            reply: node_pb2.ExpertLoadReply = await node_pb2_grpc.ExpertsStub(channel).Load(
                node_pb2.ExpertLoadRequest(), timeout=_TIMEOUT_S
            )
    return reply


def show(console: Console, node_id: str, measured: Measured, plan: ExpertPlan, copies: int) -> None:
    """Where the rows went, and what the plan would make of it."""
    rows, of_layers = measured.rows, skew(measured.rows)
    table = Table(title=f"experts of {node_id}", title_justify="left", show_header=False, box=None)
    table.add_row("rows", f"{rows.sum():,}")
    table.add_row("busiest expert over mean", f"{of_layers.mean():.2f}, worst layer {of_layers.max():.2f}")
    if measured.num_ranks > 1:
        table.add_row(
            f"busiest of {measured.num_ranks} ranks over mean, as they lie now", f"{measured.rank_skew:.2f}"
        )
    deal = ExpertPlan.deal(len(rows), rows.shape[1], plan.num_ranks)
    table.add_row(f"dealt out evenly to {plan.num_ranks} ranks", f"{deal.skew(rows):.2f}")
    table.add_row(f"by this plan, {copies} copies a layer", f"{plan.skew(rows):.2f}")
    console.print(table)


async def make_plan(
    console: Console, url: str, node_id: str, *, num_ranks: int | None, copies: int, output: Path | None
) -> None:
    """``num_ranks`` None: as many as the node deals its experts out to."""
    async with Client(url) as client:
        measured = await measure(client, node_id)
    if num_ranks is None and output is not None and measured.num_ranks == 1:
        raise click.ClickException(
            f"{node_id} has its experts on one rank: say for how many to plan, --ranks N"
        )
    plan = plan_experts(measured.rows, num_ranks or measured.num_ranks, copies)
    show(console, node_id, measured, plan, copies)
    if output is not None:
        output.write_text(plan.to_json())
        console.print(
            f"{output} is written: start nodes with --set engine.parallel.ep={plan.num_ranks} "
            f"--set engine.parallel.expert_plan_path={output}"
        )
