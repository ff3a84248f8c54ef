"""Choose the node of a role to remove: the one with the least reused blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# A rate of reuse counts for minutes: blocks of a node are worth what they save over the next ones.
_HALF_LIFE_S = 300.0


class Reuse:
    """Uses of a node's cached blocks: a sum in which a use is worth half after ``_HALF_LIFE_S``."""

    __slots__ = ("_at_s", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at_s = 0.0

    def add(self, count: float, now_s: float) -> None:
        self._sum = self.total(now_s) + count
        self._at_s = now_s

    def total(self, now_s: float) -> float:
        return self._sum * math.exp2(-max(now_s - self._at_s, 0.0) / _HALF_LIFE_S)


@dataclass(frozen=True, slots=True)
class Removable:
    """A node that may be removed. ``reused``: recent uses of its cached blocks."""

    node_id: str
    num_requests: int = 0  # that it works on
    reused: float = 0.0
    serves: bool = True  # False: it has not joined yet


def least_missed(nodes: Sequence[Removable]) -> list[Removable]:
    """Order nodes by what their removal costs: first those that do not serve, then by reuse, then by load.

    Of equal ones the last by name goes first: it is the newest.
    """
    by_name = sorted(nodes, key=lambda node: (len(node.node_id), node.node_id), reverse=True)
    return sorted(by_name, key=lambda node: (node.serves, round(node.reused), node.num_requests))
