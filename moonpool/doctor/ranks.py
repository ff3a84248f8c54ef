"""Checks of the ranks of nodes: those that the others wait for."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.doctor.evidence import Evidence
from moonpool.doctor.finding import Finding


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
