"""Checks that the processes of a cluster agree: clocks, options, and the facts in block keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from moonpool.conductor.coordination.other_conductors import KEY_FACTS
from moonpool.doctor.evidence import Evidence
from moonpool.doctor.finding import Finding, State
from moonpool.runtime.config.agreement import MUST_AGREE, default_of
from moonpool.runtime.security.call_tokens import MAX_AGE_S

# Beyond, spans of one request are out of order. Calls are refused from ``call_tokens.MAX_AGE_S`` on.
_MAX_SKEW_S = 0.1


def check_clocks(evidence: Evidence) -> Iterator[Finding]:
    """Compare the hosts' clocks, as the nodes' heartbeats report them, with the conductor's."""
    skews = {
        node["node_id"]: node["clock_offset_s"]
        for node in evidence.holders
        if node.get("clock_offset_s") is not None
    }
    for name, skew_s in sorted(skews.items()):
        if abs(skew_s) <= _MAX_SKEW_S:
            continue
        yield Finding(
            name,
            "wrong",
            f"its clock is {abs(skew_s):.2f} s {'ahead of' if skew_s > 0 else 'behind'} the conductor's: its "
            f"spans and log lines are displaced, and calls are refused from {MAX_AGE_S:g} s on",
            "run NTP (chrony) on both hosts. Leases use Redis's clock, deadlines each process's own: neither "
            "is affected",
        )
    worst_s = max(map(abs, skews.values()), default=None)
    if worst_s is not None and worst_s <= _MAX_SKEW_S:
        yield Finding("clocks", "ok", f"{len(skews)} nodes within {1e3 * worst_s:.0f} ms of the conductor's")


def check_conductors(evidence: Evidence) -> Iterator[Finding]:
    """Compare the facts that make block keys among the conductors of the same nodes."""
    own = evidence.cluster.get("facts", {})
    others: Mapping[str, Mapping[str, Any]] = evidence.cluster.get("conductors", {})
    for name, theirs in sorted(others.items()):
        for fact, means in KEY_FACTS.items():
            if fact in theirs and theirs[fact] != own.get(fact):
                yield Finding(
                    "conductors",
                    "wrong",
                    f"{name} at {theirs.get('url', '?')} has {means} ({theirs[fact]}; here {own.get(fact)})",
                    "start all conductors of a cluster with the same files (model.path) and options; give "
                    "intended exceptions an index.namespace of their own",
                )
    policies = {name: facts.get("policy") for name, facts in {"this one": own, **others}.items()}
    if len(set(policies.values())) > 1:
        listed = ", ".join(f"{name}: {policy}" for name, policy in sorted(policies.items()))
        yield Finding(
            "conductors", "slow", f"place by different policies ({listed})", "set the same conductor.policy"
        )


def check_options(evidence: Evidence) -> Iterator[Finding]:
    """Compare the options in which nodes and conductors must agree, and their versions."""
    conductor = "the conductor"
    processes: dict[str, Mapping[str, Any]] = {conductor: evidence.cluster.get("facts", {})}
    processes |= {node["node_id"]: node for node in evidence.holders if node.get("version")}
    for key, means in MUST_AGREE.items():
        # A conductor's other options of these have no effect.
        values = {
            name: process.get("options", {}).get(key, default_of(key))
            for name, process in processes.items()
            if name != conductor or key.startswith(("index.", "security.", "engine.block_size"))
        }
        yield from _disagreement(key, values, means, "wrong")
    versions = {name: process.get("version") for name, process in processes.items() if process.get("version")}
    yield from _disagreement("version", versions, "a process ignores fields it does not know", "slow")


def _disagreement(key: str, values: Mapping[str, Any], means: str, state: State) -> Iterator[Finding]:
    texts = {name: orjson.dumps(value).decode() for name, value in values.items()}
    counts = Counter(texts.values())
    if len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        differing = ", ".join(f"{name}: {text}" for name, text in sorted(texts.items()) if text != usual)
        fact = f"{usual} on most, and {differing}; {means}"
        yield Finding(key, state, fact, f"set one value of {key} on all processes")
