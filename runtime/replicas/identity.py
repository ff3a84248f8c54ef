"""The identity of a replica, passed from the node to each process it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_VARIABLE = "MOONPOOL_REPLICA"


@dataclass(frozen=True, slots=True)
class Replica:
    """One of the processes of a node with data parallelism."""

    node_id: str  # of the whole node
    number: int  # 0 to count - 1
    count: int
    node_pid: int = 0
    metrics_url: str = ""  # of the node's page, which shows all replicas
    start_number: int = 1  # counts the processes started for this replica

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Replica:
        """Parse ``asdict`` of a replica. Raises KeyError, TypeError or ValueError."""
        return cls(
            str(facts["node_id"]),
            int(facts["number"]),
            int(facts["count"]),
            int(facts["node_pid"]),
            str(facts["metrics_url"]),
            int(facts["start_number"]),
        )

    @property
    def replica_id(self) -> str:
        """Its node id in the index and for requests."""
        return f"{self.node_id}.{self.number}"

    def environment(self) -> dict[str, str]:
        """Environment variables for the process of this replica."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def ours(cls) -> Replica | None:
        """The replica that this process was started as; None for a node without replicas."""
        given = os.environ.get(_VARIABLE)
        return cls.of(json.loads(given)) if given else None
