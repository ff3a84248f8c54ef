"""Nodes on their way: which are expected, which never came, and for how long no other is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from moonpool.conductor.fleet.providers.provider import FAILED, SuppliedNode

# A node that is not in the index so long after its start, or after several times the usual time, never comes.
_LEAST_WAIT_S = 120.0
_WAIT_JOINS = 4.0
# After a failure of a provider or of a node's start: doubled with each one in a row.
_FIRST_PAUSE_S = 15.0
_LONGEST_PAUSE_S = 600.0


@dataclass(slots=True)
class Supply:
    """Of one role."""

    num_failures: int = 0  # in a row
    held_until_s: float = 0.0
    why: str = ""
    _counted: set[str] = field(default_factory=set)  # nodes whose failure was counted

    def failed(self, why: str, now_s: float) -> None:
        """The provider failed, or a node did: ask for no other for a while."""
        pause_s = min(_FIRST_PAUSE_S * 2**self.num_failures, _LONGEST_PAUSE_S)
        self.num_failures += 1
        self.held_until_s, self.why = now_s + pause_s, why

    def held(self, now_s: float) -> str:
        """Why no node is asked for now; empty: one may be."""
        if now_s >= self.held_until_s:
            return ""
        return f"none is asked for within {self.held_until_s - now_s:.0f} s: {self.why}"

    def look(
        self, supplied: Sequence[SuppliedNode], joined: Collection[str], join_s: float, now_s: float
    ) -> tuple[list[str], list[str]]:
        """Count what happened since the last look. ``joined``: names of the nodes in the index.

        Returns the nodes that are still expected, and those to give up: they take room and never came.
        """
        expected, late = [], []
        wait_s = max(_LEAST_WAIT_S, _WAIT_JOINS * join_s)
        for node in supplied:
            if node.node_id in joined:
                if node.node_id not in self._counted:
                    self._counted.add(node.node_id)
                    self.num_failures = 0
            elif node.state == FAILED and node.node_id not in self._counted:
                self._counted.add(node.node_id)
                self.failed(f"{node.node_id} {node.reason}", now_s)
            elif node.counts and node.age_s > wait_s and node.node_id not in self._counted:
                self._counted.add(node.node_id)
                late.append(node.node_id)
                self.failed(f"{node.node_id} has not registered {node.age_s:.0f} s after its start", now_s)
            elif node.counts and node.node_id not in self._counted:
                expected.append(node.node_id)
        self._counted &= {node.node_id for node in supplied}
        return expected, late
