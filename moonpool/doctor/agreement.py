"""Whether the processes of a cluster fit together: their clocks, their options, what makes block keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from moonpool.conductor.coordination.other_conductors import KEY_FACTS
from moonpool.doctor.evidence import Evidence
from moonpool.doctor.finding import Finding
from moonpool.runtime.config.agreement import MUST_AGREE, default_of

# Requests' deadlines are usually minutes, their shortest some hundred milliseconds.
_SKEW_S = 0.1


def check_clocks(evidence: Evidence) -> Iterator[Finding]:
    """Hosts' clocks against the conductor's, as the nodes' heartbeats tell them."""
    skews = {
        node["node_id"]: node["clock_offset_s"]
        for node in evidence.holders
        if node.get("clock_offset_s") is not None
    }
    for name, skew_s in sorted(skews.items()):
        if abs(skew_s) > _SKEW_S:
            ahead = skew_s > 0
            means = (
                f"its requests are given up {skew_s:.1f} s before their deadline"
                if ahead
                else f"it keeps the blocks of requests up to {-skew_s:.1f} s after their deadline"
            )
            yield Finding(
                name,
                "wrong",
                f"its clock is {abs(skew_s):.2f} s {'ahead of' if ahead else 'behind'} the conductor's: "
                f"{means}, and "
                "its spans and log lines are displaced",
                "run NTP (chrony) on both hosts. Leases go by Redis's clock and are not touched",
            )
    if skews and all(abs(skew_s) <= _SKEW_S for skew_s in skews.values()):
        most = max(abs(skew_s) for skew_s in skews.values())
        yield Finding("clocks", "ok", f"{len(skews)} nodes within {1e3 * most:.0f} ms of the conductor's")


def check_conductors(evidence: Evidence) -> Iterator[Finding]:
    """Facts that make keys, of conductors that share the nodes."""
    own = evidence.cluster.get("facts", {})
    others: Mapping[str, Mapping[str, Any]] = evidence.cluster.get("conductors", {})
    for name, theirs in sorted(others.items()):
        for fact, means in KEY_FACTS.items():
            if fact in theirs and theirs[fact] != own.get(fact):
                yield Finding(
                    "conductors",
                    "wrong",
                    f"{name} at {theirs.get('url', '?')} has {means} ({theirs[fact]}; here {own.get(fact)})",
                    "start all conductors of a cluster with the same files (model.path) and options; with "
                    "others on "
                    "purpose, give them an index.namespace of their own",
                )
    policies = {name: facts.get("policy") for name, facts in {"this one": own, **others}.items()}
    if len(set(policies.values())) > 1:
        said = ", ".join(f"{name}: {policy}" for name, policy in sorted(policies.items()))
        yield Finding(
            "conductors", "slow", f"place by different policies ({said})", "the same conductor.policy"
        )


def check_options(evidence: Evidence) -> Iterator[Finding]:
    """Options in which nodes and conductors must agree."""
    processes: dict[str, Mapping[str, Any]] = {"the conductor": evidence.cluster.get("facts", {})}
    processes |= {node["node_id"]: node for node in evidence.holders if node.get("version")}
    for key, means in MUST_AGREE.items():
        # What a conductor has of these matters to nobody but for those it keeps the index by.
        asked = {
            name: process.get("options", {}).get(key, default_of(key))
            for name, process in processes.items()
            if name != "the conductor" or key.startswith(("index.", "engine.block_size"))
        }
        yield from _disagreement(key, asked, means, "wrong")
    versions = {name: process.get("version") for name, process in processes.items() if process.get("version")}
    yield from _disagreement("version", versions, "fields that one does not know are ignored", "slow")


def _disagreement(key: str, values: Mapping[str, Any], means: str, state: Any) -> Iterator[Finding]:
    texts = {name: orjson.dumps(value).decode() for name, value in values.items()}
    counts = Counter(texts.values())
    if len(counts) < 2:
        return
    usual = counts.most_common(1)[0][0]
    differing = ", ".join(f"{name}: {text}" for name, text in sorted(texts.items()) if text != usual)
    yield Finding(
        key, state, f"{usual} on most, and {differing}; {means}", f"one value of {key} on all processes"
    )
