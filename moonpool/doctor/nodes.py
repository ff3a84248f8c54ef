"""Checks of the nodes: each role is served, why some do not serve, and ranks that the others wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moonpool.commands.status import state_of
from moonpool.doctor.evidence import Evidence
from moonpool.doctor.finding import Finding
from moonpool.kvstore.index.redis.node_record import stages_of

_SERVING = ("ready", "unhealthy", "partial")
_ADVICE = {
    "partial": "the other replicas restart by themselves; if that lasts, its log says why they end",
    "gated": "a rollout watches it before it gets requests",
    "starting": "it loads; see its log if that lasts",
    "draining": "it ends its requests and leaves",
    "unreachable": "can the conductor's host reach it? See its log, and node.host",
}


def check_nodes(evidence: Evidence) -> Iterator[Finding]:
    for role in ("prefill", "decode"):
        states = {node["state"] for node in evidence.nodes if role in stages_of(node["role"])}
        serving = states & set(_SERVING)
        if not serving:
            yield Finding(f"{role} nodes", "missing", "none is ready", f"start one: moonpool {role}-node")
        elif serving == {"unhealthy"}:
            yield Finding(f"{role} nodes", "wrong", "all are unhealthy, and serve anyway", "see each below")
    for node in evidence.nodes:
        yield _node(node)


def check_security(evidence: Evidence) -> Iterator[Finding]:
    """Report processes that are open to all, and certificates that have expired or will soon."""
    warnings = {"the conductor": evidence.cluster.get("warnings", ())}
    warnings |= {node["node_id"]: node.get("warnings", ()) for node in evidence.holders}
    for name, sentences in warnings.items():
        for sentence in sentences:
            yield Finding(name, "wrong", sentence, "docs/operations.md, Keys and certificates")


def check_ranks(evidence: Evidence) -> Iterator[Finding]:
    """Report nodes that have a slow rank, and unequal stages by the measured seconds of their layers."""
    for node in evidence.holders:
        if layers := node.get("better_pp_layers"):
            yield Finding(
                node["node_id"],
                "slow",
                f"its pipeline stages ({node['ranks']}) take unequal time",
                f"set engine.parallel.pp_layers={layers}: it balances the stages under its load so far",
            )
        if sentence := node.get("slow_rank"):
            yield Finding(
                node["node_id"],
                "slow",
                sentence,
                "look for other processes on its cores or GPU, a device that is hot or throttled",
            )


def _gpus(node: Mapping[str, Any]) -> str:
    """What is free on its GPUs, and what its pool does not know of."""
    told = ""
    for gpu in node.get("health", {}).get("gpus", ()):
        if (free := gpu.get("memory_free_nbytes")) is not None:
            told += f"; GPU {gpu['gpu']}: {free / 2**30:.1f} GiB free"
        if taken := gpu.get("memory_taken_nbytes"):
            told += f", {taken / 2**30:.1f} GiB less than its pool believes"
    return told


def _node(node: Mapping[str, Any]) -> Finding:
    name, state = node["node_id"], node["state"]
    fact = f"{node['role']} on {node['host']}, {state_of(dict(node))}{_gpus(node)}"
    if state == "ready":
        return Finding(name, "ok", fact)
    if state == "unhealthy":
        advice = "it gets no requests while others serve; repair the host, or change the limit (health.*)"
        return Finding(name, "wrong", f"{fact}: {'; '.join(node['reasons'])}", advice)
    if state == "incompatible":
        advice = "the same model.path, model.dtype and engine.block_size on all; or another index.namespace"
        return Finding(name, "wrong", f"{fact}: {node['incompatible']}", advice)
    return Finding(name, "slow", fact, _ADVICE.get(state, "see its log"))
