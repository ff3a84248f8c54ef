"""The nodes of one role, as objects and as arrays."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from moonpool.conductor.placing.node_view import NodeView
from moonpool.runtime.cost_profile import CostProfile

# Up to this many nodes each gets an estimate; beyond, arrays choose a shortlist. Arrays cost 60 µs at any
# size, one estimate 3 µs.
SMALL = 24

# Rows of the table: the inputs of all estimates.
(
    ENDS_S,
    DUE_S,
    WAITING_S,
    PREFILL_BASE_S,
    PREFILL_TOKEN_S,
    PREFILL_ATTENTION_S,
    STEP_BASE_S,
    STEP_SEQUENCE_S,
    STEP_CONTEXT_S,
    NUM_RUNNING,
    NUM_WAITING,
    NUM_CONTEXT_TOKENS,
    NUM_FREE_BLOCKS,
    NUM_BLOCKS,
    NUM_PLACED,
    JITTER_S,
) = range(16)
_ROWS = 16

# Breaks ties of equal nodes by their names, whatever their order.
_JITTER_S = 1e-7


class NodeTable:
    """Nodes in no particular order. Call ``touch`` after every change of a view in it."""

    def __init__(self, nodes: Iterable[NodeView] = ()) -> None:
        self._nodes: list[NodeView] = []
        self._positions: dict[str, int] = {}
        self._stale: set[int] = set()
        self._table: npt.NDArray[np.float64] | None = None
        self._slots = np.zeros(0, np.int64)
        for node in nodes:
            self.add(node)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[NodeView]:
        return iter(self._nodes)

    def __getitem__(self, position: int) -> NodeView:
        return self._nodes[position]

    def __contains__(self, node: object) -> bool:
        return isinstance(node, NodeView) and self.get(node.node_id) is node

    def get(self, node_id: str) -> NodeView | None:
        position = self._positions.get(node_id)
        return None if position is None else self._nodes[position]

    def position(self, node_id: str) -> int | None:
        """Its column in the arrays, until a node is removed."""
        return self._positions.get(node_id)

    @property
    def small(self) -> bool:
        """Whether each node gets an estimate."""
        return len(self._nodes) <= SMALL

    def add(self, node: NodeView) -> None:
        """``node`` is not in it yet."""
        assert node.node_id not in self._positions
        self._positions[node.node_id] = len(self._nodes)
        self._stale.add(len(self._nodes))
        self._nodes.append(node)

    def remove(self, node: NodeView) -> None:
        """The last node takes its position."""
        position = self._positions.pop(node.node_id)
        last = self._nodes.pop()
        self._stale.discard(len(self._nodes))
        if last is not node:
            self._nodes[position] = last
            self._positions[last.node_id] = position
            self._stale.add(position)

    def touch(self, node: NodeView) -> None:
        """``node`` has changed; ignored if it is not in this table."""
        position = self._positions.get(node.node_id)
        if position is not None:
            self._stale.add(position)

    def window(self, first: int, count: int) -> list[NodeView]:
        """Up to ``count`` nodes from position ``first`` on, wrapping around."""
        nodes = self._nodes[first : first + count]
        return nodes + self._nodes[: min(count - len(nodes), first)]

    def table(self, now_s: float) -> npt.NDArray[np.float64]:
        """float64 [rows, nodes], rows as named above. Read-only, valid until the fleet changes.

        Cost corrections are as of the last ``touch`` of their node.
        """
        count = len(self._nodes)
        table = self._table
        if table is None or table.shape[1] < count:
            table = self._table = np.zeros((_ROWS, 2 * count))
            self._slots = np.full(2 * count, -1, np.int64)
            self._stale.update(range(count))
        if self._stale:
            for position in self._stale:
                node = self._nodes[position]
                table[:, position] = _row(node, now_s)
                self._slots[position] = node.slot
            self._stale.clear()
        return table[:, :count]

    def costs(self, now_s: float) -> CostProfile[npt.NDArray[np.float64]]:
        """The corrected cost profiles of all nodes: views of rows of ``table``."""
        return CostProfile(*self.table(now_s)[PREFILL_BASE_S : STEP_CONTEXT_S + 1])

    def slots(self) -> npt.NDArray[np.int64]:
        """int64 [nodes]: ``NodeView.slot`` of each, as of the last ``table``."""
        return self._slots[: len(self._nodes)]


def _row(node: NodeView, now_s: float) -> tuple[float, ...]:
    cost, queue = node.cost, node.queue
    costs = cost.profile.scaled(cost.prefill_correction.factor(now_s), cost.decode_correction.factor(now_s))
    return (
        queue.ends_s,
        queue.due_s,
        queue.waiting_s + node.foreign_queue_s,
        costs.prefill_base_s,
        costs.prefill_token_s,
        costs.prefill_attention_s,
        costs.decode_base_s,
        costs.decode_sequence_s,
        costs.decode_context_s,
        node.num_running,
        node.num_waiting,
        node.num_context_tokens,
        node.num_free_blocks,
        node.num_blocks or np.inf,
        node.num_placed,
        zlib.crc32(node.node_id.encode()) * (_JITTER_S / 2**32),
    )
