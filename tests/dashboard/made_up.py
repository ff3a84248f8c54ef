"""Snapshots of clusters that no test can run: one of a small cluster, with its nodes many times over."""

from __future__ import annotations

import copy
import random
from typing import Any

MAX_ROUTES = 512  # as many as a conductor counts
_EVENTS, _REQUESTS, _PREFIXES = 200, 40, 49  # as many as a snapshot has


def large(now: dict[str, Any], num_nodes: int, second: int, seed: int = 7) -> dict[str, Any]:
    """``now`` with ``num_nodes`` nodes, half of them of each role, and transfers between them.

    Figures change from second to second.
    """
    rng = random.Random(seed * 1000 + second)
    made = copy.deepcopy(now)
    made["unix_s"] = now["unix_s"] + second
    whole = [node for node in now["cluster"]["nodes"] if not node.get("replicas")]
    half = num_nodes // 2
    nodes = [_node(whole, rng, role, number) for role in ("prefill", "decode") for number in range(half)]
    made["cluster"]["nodes"] = nodes
    counts = {"candidate": {"requests": 200, "errors": 3}, "stable": {"requests": 1800, "errors": 9}}
    canary = {"name": "large", "candidate": "next", "share": 10, "state": "running", "verdict": "wait"}
    made["cluster"]["canaries"] = [canary | {"sides": counts}]
    model = {"num_nodes": half, "num_requests": 3, "num_idle": 2, "queues": False, "stranded_node_s": 1234.5}
    made["cluster"]["models"] = [
        model | {"name": "large", "queues": True, "num_idle": 0, "loan": "lend decode-1 to large: it queues"},
        model | {"name": "next"},
    ]
    pairs = [
        (f"prefill-{i % half}", f"decode-{(i * 7 + i // half) % half}")
        for i in range(min(MAX_ROUTES, 8 * half))
    ]
    made["routes"] = [
        {
            "source": source,
            "target": target,
            "transport": "tcp",
            "nbytes": (second + 1) * 10_000_000 * (1 + number % 9),
            "seconds": 0.02 * (second + 1) * (1 + number % 5),
            "transfers": 10 * (second + 1),
            "failures": number % 31 == 0,
            "last_s": made["unix_s"],
        }
        for number, (source, target) in enumerate(pairs)
    ]
    made["prefixes"] = [
        {
            "key": f"{number:032x}",
            "depth": number % 4,
            "blocks": 16 * (number % 4 + 1),
            "uses_per_s": 3.0 / (number + 1),
            "hits": 100 * (50 - number),
            "misses": number,
            "tenant": f"tenant-{number % 5}",
            "copies": half,
            "holders": [f"prefill-{name}" for name in range(min(half, 8))],
            "tiers": {"pool": half // 2, "ssd": half - half // 2},
        }
        for number in range(_PREFIXES)
    ]
    role = {"ready": half, "starting": 0, "needed": half, "target": half, "attained": 1.0, "why": "enough"}
    made["planner"] = {"mode": "act", "state": "steady", "steps": []}
    made["planner"]["roles"] = {name: {**role, "held": "", "join": {}} for name in ("prefill", "decode")}
    move = {"source": "decode-0", "target": "decode-1", "cause": "hot-spot", "reason": "long steps"}
    made["cluster"]["migrations"] = [move | {"request_id": f"cmpl-{i:024x}"} for i in range(3)]
    made["degraded"] = []
    event = {"kind": "joined", "text": "a node joined"}
    made["events"] = [
        {**event, "number": i, "unix_s": made["unix_s"] - i, "node": f"decode-{i % half}"}
        for i in range(_EVENTS)
    ]
    first = now["requests"][0]
    made["requests"] = [
        {**first, "id": f"cmpl-{second}-{i}", "received_unix_s": made["unix_s"] - i / 100}
        for i in range(_REQUESTS)
    ]
    return made


def _node(whole: list[dict[str, Any]], rng: random.Random, role: str, number: int) -> dict[str, Any]:
    node = copy.deepcopy(whole[number % len(whole)])
    node |= {"node_id": f"{role}-{number}", "role": role, "num_index_blocks": rng.randrange(100_000)}
    node["state"] = "unhealthy" if number % 97 == 5 else "ready"
    node["load"] |= {"num_running": rng.randrange(64), "num_queued_tokens": rng.randrange(20_000)}
    for tier in node["tiers"]:
        tier["num_cached_blocks"] = rng.randrange(max(tier["num_blocks"], 1))
    return node
