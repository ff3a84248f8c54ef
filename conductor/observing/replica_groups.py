"""The replicas of one node shown as one node, under its name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.kvstore.index.redis.node_record import NodeRecord

Facts = dict[str, Any]  # a node of ``/v1/cluster``

# The state of a node without a ready replica: the first of these that a replica has.
_NOT_READY = ("draining", "gated", "starting", "unreachable")
# Equal for all replicas of a node.
_SAME = ("role", "host", "region", "zone", "versions", "machine", "weights", "model")


def grouped(nodes: Iterable[Facts]) -> list[Facts]:
    """``node_status`` of each member, with replicas of the same node and role as one node.

    A node without replicas gets an empty list ``replicas``. A node with replicas has them there, in order;
    its own fields are sums, and one state.
    """
    replicas: defaultdict[tuple[str, str], list[Facts]] = defaultdict(list)
    whole: list[Facts] = []
    for facts in nodes:
        if facts["replica"] is None:
            whole.append(facts | {"replicas": []})
        else:
            replicas[facts["replica"]["node_id"], facts["role"]].append(facts)
    whole += [
        _node(node_id, sorted(group, key=lambda facts: facts["replica"]["number"]))
        for (node_id, _), group in replicas.items()
    ]
    return sorted(whole, key=lambda facts: str(facts["node_id"]))


def holders(node: Facts) -> Sequence[Facts]:
    """The replicas of a node, or the node itself: the names that requests and blocks are counted under."""
    return node.get("replicas") or [node]


@dataclass(frozen=True, slots=True)
class MissingReplicas:
    """A node with only ``present`` of its ``count`` replicas in the index."""

    node_id: str
    role: str
    present: int
    count: int


def missing_replicas(records: Iterable[NodeRecord]) -> list[MissingReplicas]:
    """Nodes with some of their replicas in the index, but not all."""
    counts = Counter((one.replica.node_id, one.role, one.replica.count) for one in records if one.replica)
    return [
        MissingReplicas(node_id, role, present, count)
        for (node_id, role, count), present in sorted(counts.items())
        if present < count
    ]


def _node(node_id: str, replicas: list[Facts]) -> Facts:
    first = replicas[0]
    replica = first["replica"]
    states = [one["state"] for one in replicas]
    joins = [one["join_s"] for one in replicas if one["join_s"] is not None]
    ranks = f"dp {replica['count']}" + (f" × {first['ranks']}" if first["ranks"] else "")
    node: Facts = {name: first[name] for name in _SAME} | {
        "node_id": node_id,
        "pid": replica["node_pid"],
        "ranks": ranks,
        "num_replicas": replica["count"],
        "join_s": max(joins, default=None),
        "state": _state(states, replica["count"]),
        "num_serving": _num_serving(states),
        "reasons": [f"{one['node_id']}: {reason}" for one in replicas for reason in one["reasons"]],
        "health": _health([one["health"] for one in replicas]),
        "metrics_url": replica["metrics_url"],
        "load": {name: sum(one["load"][name] for one in replicas) for name in first["load"]},
        "tiers": _tiers(replicas),
        "num_placed": sum(one["num_placed"] for one in replicas),
        "num_index_blocks": sum(one["num_index_blocks"] for one in replicas),
        "replicas": replicas,
    }
    if whys := [one["incompatible"] for one in replicas if "incompatible" in one]:
        node["incompatible"] = whys[0]
    return node


def _state(states: list[str], count: int) -> str:
    """``ready``: all; ``unhealthy``: all serve; ``partial``: some serve; else the first of ``_NOT_READY``."""
    num_serving = _num_serving(states)
    if num_serving:
        return "partial" if num_serving < count else "unhealthy" if "unhealthy" in states else "ready"
    return next((state for state in _NOT_READY if state in states), states[0])


def _num_serving(states: list[str]) -> int:
    return states.count("ready") + states.count("unhealthy")


def _health(readings: list[Facts]) -> Facts:
    """Replicas share one host; each has its own GPUs."""
    gpus = [gpu for one in readings for gpu in one.get("gpus", ())]
    return {**readings[0], "gpus": gpus} if readings[0] else {}


def _tiers(replicas: list[Facts]) -> list[Facts]:
    tiers: dict[str, Facts] = {}
    for one in replicas:
        for tier in one["tiers"]:
            total = tiers.setdefault(tier["name"], {"name": tier["name"]})
            for name, value in tier.items():
                if name != "name":
                    total[name] = total.get(name, 0) + value
    return list(tiers.values())
