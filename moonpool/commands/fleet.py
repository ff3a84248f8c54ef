"""``moonpool fleet``: list the nodes, change their number and roles, drain one, move a request."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from moonpool.client import Client
from moonpool.commands.canary import canary
from moonpool.commands.options import console, json_option, plain_table, run_with_client, show, url_option

_TEXTS = ("node", "role", "state", "supplied", "why")
_FIGURES = ("requests",)

_model_option = click.option(
    "--model",
    default="",
    metavar="NAME",
    help="in a cluster with several models, which  [default: the first]",
)


@click.group()
def fleet() -> None:
    """List the nodes of a cluster, change their number, roles and settings, drain one, move a request.

    Changes need an admin key, or where no API keys are configured the cluster's key.
    """


fleet.add_command(canary)


@fleet.command("ls")
@_model_option
@url_option
@json_option
def ls_command(model: str, url: str, as_json: bool) -> None:
    """List all nodes of a model: as they serve, and as their provider knows them."""
    found = run_with_client(url, lambda client: client.fleet(model))
    show(found, fleet_view(found), as_json)


@fleet.command("plan")
@_model_option
@url_option
@json_option
def plan_command(model: str, url: str, as_json: bool) -> None:
    """Show what a model's planner sees, and what it does or would do."""
    found = run_with_client(url, lambda client: client.fleet(model))["planner"]
    show(found, plan_view(found), as_json)


@fleet.command("scale")
@click.argument("role")
@click.argument("count", type=click.IntRange(min=1))
@_model_option
@url_option
def scale_command(role: str, count: int, model: str, url: str) -> None:
    """Have the provider run COUNT nodes of ROLE (prefill, decode or both) of a model.

    Nodes that are too many drain first: those with the cached blocks that are used least.
    """
    done = run_with_client(url, lambda client: client.scale(role, count, model))
    for what, names in (("starts", done["started"]), ("drains and ends", done["stopped"])):
        for name in names:
            console.print(f"{name} {what}")
    if not done["started"] and not done["stopped"]:
        console.print(f"there are {count} {role} nodes already")


@fleet.command("switch")
@click.argument("node")
@click.argument("role", required=False, type=click.Choice(("prefill", "decode", "both")))
@click.option("--model", "name", metavar="NAME", help="Serve this model of the cluster; the role stays.")
@click.option(
    "--wait", "wait_s", default=600.0, show_default=True, metavar="SECONDS", help="For it to serve the model."
)
@url_option
def switch_command(node: str, role: str | None, name: str | None, wait_s: float, url: str) -> None:
    """Have NODE become a node of ROLE: its cache stays. Or have it serve another model.

    No request is lost. For another model the node drains and starts again, on the same machine and GPUs. Exit
    code 1: it did not start with that model, and serves the one before again; or it does not serve it yet.
    """
    if name is not None and role is None:
        _switch_model(node, name, wait_s, url)
        return
    if role is None or name is not None:
        raise click.UsageError("give a ROLE, or --model NAME")
    done = run_with_client(url, lambda client: client.switch(node, role))
    left = (
        f"; {done['num_requests']} requests of a {done['former']} node go on" if done["num_requests"] else ""
    )
    console.print(f"{node} becomes a {role} node{left}")


def _switch_model(node: str, name: str, wait_s: float, url: str) -> None:
    async def switched(client: Client) -> tuple[dict[str, Any], dict[str, Any], dict[str, float]]:
        done, ended = await client.switch_model(node, name), {"state": "failed", "reason": "it has ended"}
        until_s = time.monotonic() + wait_s
        while True:
            nodes = {one["node_id"]: one for one in (await client.fleet(name))["nodes"]}
            found = nodes.get(done["node_id"], {"supplied": ended, "states": (), "join": {}})
            # None: the provider does not answer now.
            supplied = found["supplied"] or {"state": "unknown"}
            serves = supplied["state"] == "running" and "ready" in found["states"]
            if serves or supplied["state"] in ("failed", "refused"):
                return done, supplied, found.get("join", {})
            if time.monotonic() > until_s:
                states = ", ".join(found["states"]) or "not registered"
                raise click.ClickException(
                    f"{node} does not serve {name} after {wait_s:g} s (its process: {supplied['state']}; as "
                    f"a node: {states}). The switch goes on: see its log, and {url}/v1/fleet?model={name}"
                )
            await asyncio.sleep(0.1)

    done, supplied, join = run_with_client(url, switched)
    if supplied["state"] in ("failed", "refused"):
        former = f"; it starts with {done['former']} again" if supplied["state"] == "refused" else ""
        console.print(f"{node} does not serve {name}{former}: {supplied['reason']}", style="red")
        raise click.exceptions.Exit(1)
    console.print(f"{node} serves {name}: drained in {supplied['drain_s']:.2f} s; {_phases(join)}")
    if not done["num_left"]:
        console.print(f"no node serves {done['former']} now", style="yellow")


def _phases(join: dict[str, float]) -> str:
    return ", ".join(f"{phase.replace('_', ' ')} {seconds:.2g} s" for phase, seconds in join.items())


@fleet.command("migrate")
@click.argument("request")
@click.option("--to", "target", default="", metavar="NODE", help="The decode node; default: the best one.")
@url_option
def migrate_command(request: str, target: str, url: str) -> None:
    """Move the running REQUEST to another decode node. Its stream goes on."""
    done = run_with_client(url, lambda client: client.migrate(request, target))
    for move in done["moves"]:
        gap_ms = 1e3 * move["downtime_s"]
        console.print(f"{move['source']} handed it to {move['target']}; no token for {gap_ms:.1f} ms")


@fleet.command("drain")
@click.argument("node")
@url_option
def drain_command(node: str, url: str) -> None:
    """Have NODE finish its requests and end. A provider does not start it again."""
    done = run_with_client(url, lambda client: client.drain(node))
    console.print(f"{done['node_id']} drains and ends")


@fleet.command("rollout")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="an option of nodes; repeatable")
@click.option("--model", help="a checkpoint directory of the same model, as model.path")
@click.option("--watch-s", default=5.0, show_default=True, help="how long each new node is watched")
@click.option("--status", is_flag=True, help="show the latest rollout instead")
@click.option("--abort", is_flag=True, help="roll back the one that runs")
@url_option
@json_option
def rollout_command(
    settings: tuple[str, ...],
    model: str | None,
    watch_s: float,
    status: bool,
    abort: bool,
    url: str,
    as_json: bool,
) -> None:
    """Replace all nodes, one by one, by nodes with other settings, while they serve.

    Each new node must join, answer, and be watched before the requests of the one before it move away and it
    ends. A new node that fails is removed with its reason, and those before it are replaced back. Exit code
    1: it was rolled back, or has failed.
    """
    chosen = [*settings, *([f"model.path={model}"] if model else [])]

    async def done(client: Client) -> dict[str, Any]:
        if status:
            return await client.rollout_status()
        found = await (client.abort_rollout() if abort else client.rollout(chosen, watch_s))
        while found["state"] in ("running", "rolling back"):
            await asyncio.sleep(0.5)
            found = await client.rollout_status()
        return found

    found = run_with_client(url, done)
    show(found, rollout_view(found), as_json)
    if not status and not abort and found["state"] != "done":
        raise click.exceptions.Exit(1)


def rollout_view(found: dict[str, Any]) -> RenderableType:
    """A table with a row for each node that was replaced."""
    table = plain_table(("node", "by", "state"), ("probe before", "after"))
    for move in found["moves"]:
        probes = (f"{move[name]:.3f} s" for name in ("old_probe_s", "probe_s"))
        table.add_row(move["old"], move["new"], move["state"], *probes)
    title = (
        f"rollout of {', '.join(found['settings']) or 'nothing'}: {found['state']}, {found['seconds']:.0f} s"
    )
    kept = [f"{what} {part:.1%}" for what, part in found["attained"].items() if part is not None]
    parts: list[RenderableType] = [Text(title, style="bold"), table]
    parts += [Text(f"requests within the SLO: {', '.join(kept)}")] if kept else []
    parts += [Text(found["reason"], style="yellow")] if found["reason"] else []
    return Group(*parts)


def fleet_view(found: dict[str, Any]) -> RenderableType:
    """A table with a row for each node."""
    has_regions = any(node.get("region") for node in found["nodes"])
    table = plain_table((*_TEXTS, "region") if has_regions else _TEXTS, _FIGURES)
    for node in sorted(found["nodes"], key=lambda node: (node["role"] != "prefill", node["node_id"])):
        states = ", ".join(sorted(set(node["states"]))) or "not in the index"
        supplied = node["supplied"] or {"state": "by others", "reason": ""}
        row = [node["node_id"], node["role"], states, supplied["state"], supplied["reason"]]
        if has_regions:
            row.append(region_of(node))
        table.add_row(*row, str(node["num_requests"]))
    provider = found["provider"] or "none: nodes are started and stopped by others"
    parts: list[RenderableType] = [Text(f"provider: {provider}", style="bold"), table]
    if found["trouble"]:
        parts.append(Text(f"the provider does not answer: {found['trouble']}", style="yellow"))
    return Group(*parts)


def region_of(node: dict[str, Any]) -> str:
    """Its region, with its zone if it has one, such as ``eu/a``."""
    return "/".join(filter(None, (node.get("region"), node.get("zone"))))


def plan_view(found: dict[str, Any]) -> RenderableType:
    """A table with a row for each role, and the steps of the last round."""
    table = plain_table(("role",), ("ready", "starting", "needed", "target", "SLO kept", "joins in"))
    reasons: list[RenderableType] = []
    for role, state in found["roles"].items():
        kept = "–" if state["attained"] is None else f"{state['attained']:.0%}"
        counts = (str(state.get(name, "–")) for name in ("ready", "starting", "needed", "target"))
        table.add_row(role, *counts, kept, f"{state['join_s']:.1f} s")
        reasons.append(Text(f"{role}: {state.get('reason', state['why'])}"))
        if join := state.get("join"):
            reasons.append(Text(f"{role} joins: {_phases(join)}"))
        if state["held"]:
            reasons.append(Text(f"{role}: {state['held']}", style="yellow"))
    if loan := found.get("loan"):
        reasons.append(Text(loan))
    title = Text(f"planner: mode {found['mode']}, {found['state']}", style="bold")
    steps = [
        Text(f"{'' if found['mode'] == 'act' else 'would '}{step['kind']} {step['node_id'] or step['role']}")
        for step in found["steps"]
    ]
    return Group(title, table, *reasons, *steps)
