"""``moonpool status``: the conductor's view of the cluster, as a table."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from moonpool.client import Client
from moonpool.commands.options import json_option, plain_table, run_with_client, show, url_option

_STYLES = {
    "ready": "green",
    "partial": "yellow",
    "draining": "yellow",
    "gated": "yellow",
    "starting": "yellow",
    "unreachable": "red",
    "unhealthy": "red",
}


_TEXTS = ("node", "role", "state", "host", "pid", "ranks", "joined in")
_FIGURES = ("running", "waiting", "queued tokens", "pool in use", "host blocks", "disk blocks", "placed")


@click.command("status")
@url_option
@json_option
def status_command(url: str, as_json: bool) -> None:
    """Print the cluster's nodes and their load."""
    cluster = run_with_client(url, Client.cluster)
    show(cluster, cluster_view(url, cluster), as_json)


def cluster_view(url: str, cluster: dict[str, Any]) -> RenderableType:
    """A table with a row for each node, and below it one for each of its replicas."""
    table = plain_table(_TEXTS, _FIGURES)
    for node in sorted(cluster["nodes"], key=lambda node: (node["role"] != "prefill", node["node_id"])):
        table.add_row(*_row(node, node["node_id"]))
        for one in node.get("replicas", ()):
            table.add_row(*_row(one, f"  {one['node_id']}"))
    parts: list[RenderableType] = [Text(url, style="bold"), table]
    parts += [Text(f"degraded: {sentence}", style="yellow") for sentence in cluster.get("degraded", [])]
    return Group(*parts)


def state_of(node: dict[str, Any]) -> str:
    """Return the state; for a partial node, how many of its replicas serve."""
    if node["state"] != "partial":
        return str(node["state"])
    return f"{node['num_serving']} of {node['num_replicas']} serve"


def _row(node: dict[str, Any], name: str) -> list[str | Text]:
    load = node["load"]
    used = load["num_blocks"] - load["num_free_blocks"]
    return [
        name,
        node["role"],
        Text(state_of(node), style=_STYLES.get(node["state"], "")),
        node["host"],
        str(node["pid"]),
        node.get("ranks") or "1",
        f"{node['join_s']:.1f} s" if node.get("join_s") is not None else "–",
        str(load["num_running"]),
        str(load["num_waiting"]),
        str(load["num_queued_tokens"]),
        f"{used}/{load['num_blocks']}",
        *(_fill(node, tier) for tier in ("host", "ssd")),
        str(node["num_placed"]),
    ]


def _fill(node: dict[str, Any], name: str) -> str:
    """Return used/capacity in blocks of a tier."""
    for tier in node.get("tiers", ()):
        if tier["name"] == name:
            return f"{tier['num_used_blocks']}/{tier['num_blocks']}"
    return "–"
