"""The cluster in a few numbers, for a scrape: counted without describing every node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ClusterCounts:
    """``nodes`` by (role, state); blocks over every node's pool."""

    num_blocks: int = 0
    num_used_blocks: int = 0  # held by sequences
    nodes: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_missing_replicas: Counter[str] = field(default_factory=Counter)  # by role, of nodes that are there
