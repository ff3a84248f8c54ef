"""Which replica of a node a process is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_VARIABLE = "MOONPOOL_REPLICA"


@dataclass(frozen=True, slots=True)
class Replica:
    """One of the processes behind one node's name, told by the node to each process it starts."""

    node_id: str  # the node's
    number: int  # 0 to count - 1
    count: int
    node_pid: int = 0
    metrics_url: str = ""  # the node's, which shows all replicas
    life: int = 1  # which of this replica's processes

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Replica:
        """From what was JSON. Raises KeyError, TypeError or ValueError."""
        return cls(
            str(facts["node_id"]),
            int(facts["number"]),
            int(facts["count"]),
            int(facts["node_pid"]),
            str(facts["metrics_url"]),
            int(facts["life"]),
        )

    @property
    def replica_id(self) -> str:
        """The name under which it holds blocks and takes requests."""
        return f"{self.node_id}.{self.number}"

    def environment(self) -> dict[str, str]:
        """For the process that is to be this replica."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def ours(cls) -> Replica | None:
        """What this process was started as; None: it is a node of its own."""
        given = os.environ.get(_VARIABLE)
        return cls.of(json.loads(given)) if given else None
