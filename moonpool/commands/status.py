"""The cluster as its conductor sees it, as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_STYLES = {
    "ready": "green",
    "partial": "yellow",
    "draining": "yellow",
    "starting": "yellow",
    "unreachable": "red",
    "unhealthy": "red",
}


def cluster_view(url: str, cluster: dict[str, Any]) -> RenderableType:
    """A row a node, and below a node of several replicas a row a replica."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("node", "role", "state", "host", "pid", "ranks", "joined in"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "running",
        "waiting",
        "queued tokens",
        "pool blocks used",
        "host blocks",
        "disk blocks",
        "placed",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for node in sorted(cluster["nodes"], key=lambda node: (node["role"] != "prefill", node["node_id"])):
        table.add_row(*_row(node, node["node_id"]))
        for one in node.get("replicas", ()):
            table.add_row(*_row(one, f"  {one['node_id']}"))
    parts: list[RenderableType] = [Text(url, style="bold"), table]
    parts += [Text(f"degraded: {sentence}", style="yellow") for sentence in cluster.get("degraded", [])]
    return Group(*parts)


def state_of(node: dict[str, Any]) -> str:
    """In words: of a node of several replicas, how many serve."""
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
    """How much a tier holds, of how much it has room for."""
    for tier in node.get("tiers", ()):
        if tier["name"] == name:
            return f"{tier['num_used_blocks']}/{tier['num_blocks']}"
    return "–"
