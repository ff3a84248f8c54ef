"""Checks of the ranks of nodes: those that the others wait for."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.doctor.evidence import Evidence
from moonpool.doctor.finding import Finding


def check_ranks(evidence: Evidence) -> Iterator[Finding]:
    """Report nodes that have a slow rank."""
    for node in evidence.holders:
        if sentence := node.get("slow_rank"):
            yield Finding(
                node["node_id"],
                "slow",
                sentence,
                "look for other processes on its cores or GPU, a device that is hot or throttled, and with "
                "engine.parallel.pp for a stage with more work",
            )
