"""Nodes as their operators know them: the replicas of one node together, under its name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.kvstore.index.redis.node_record import NodeRecord

Facts = dict[str, Any]  # a node of ``/v1/cluster``

# What is said of a node none of whose replicas is ready, where they differ: the first that fits.
_NOT_READY = ("draining", "starting", "unreachable")


def grouped(nodes: Iterable[Facts]) -> list[Facts]:
    """``node_status`` of each member, those with the same ``replica.node_id`` and role as one node.

    A node of one process gets an empty list ``replicas``; one of several has its replicas there, in order,
    and in its own fields what can be said of all: sums, and a state.
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
    """What takes requests and holds blocks under a name of its own: a node's replicas, or the node itself."""
    return node.get("replicas") or [node]


@dataclass(frozen=True, slots=True)
class MissingReplicas:
    """``present`` of a node's ``count`` replicas are in the index."""

    node_id: str
    role: str
    present: int
    count: int


def missing_replicas(records: Iterable[NodeRecord]) -> list[MissingReplicas]:
    """Nodes of which some replicas are in the index and some are not."""
    counts = Counter((one.replica.node_id, one.role, one.replica.count) for one in records if one.replica)
    return [
        MissingReplicas(node_id, role, present, count)
        for (node_id, role, count), present in sorted(counts.items())
        if present < count
    ]


def _node(node_id: str, replicas: list[Facts]) -> Facts:
    first = replicas[0]
    told = first["replica"]
    states = [one["state"] for one in replicas]
    joins = [one["join_s"] for one in replicas if one["join_s"] is not None]
    ranks = f"dp {told['count']}" + (f" × {first['ranks']}" if first["ranks"] else "")
    node: Facts = {
        "node_id": node_id,
        "role": first["role"],
        "host": first["host"],
        "pid": told["node_pid"],
        "ranks": ranks,
        "num_replicas": told["count"],
        "join_s": max(joins, default=None),
        "state": _state(states, told["count"]),
        "num_serving": _num_serving(states),
        "versions": first["versions"],
        "reasons": [f"{one['node_id']}: {reason}" for one in replicas for reason in one["reasons"]],
        "health": _health([one["health"] for one in replicas]),
        "metrics_url": told["metrics_url"],
        "model": first["model"],
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
    """``ready``: all are; ``unhealthy``: all serve; ``partial``: some do; else what most hinders them."""
    num_serving = _num_serving(states)
    if num_serving:
        return "partial" if num_serving < count else "unhealthy" if "unhealthy" in states else "ready"
    return next((state for state in _NOT_READY if state in states), states[0])


def _num_serving(states: list[str]) -> int:
    return states.count("ready") + states.count("unhealthy")


def _health(readings: list[Facts]) -> Facts:
    """They are on one host, and each has GPUs of its own."""
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
