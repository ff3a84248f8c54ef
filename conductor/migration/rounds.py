"""Which moves of running requests to begin now: the decisions within bounds, live and simulated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from moonpool.conductor.migration.decisions import (
    DRAIN,
    Move,
    Running,
    Waiting,
    plan_defragment,
    plan_drain,
    plan_hot_spots,
    plan_priority,
)
from moonpool.conductor.placing.node_view import NodeView

# Moves in flight at once: from one node, and in all. A storm would cost every stream a pause.
_MOST_FROM_ONE = 4
_MOST = 16
# How long a request that has moved or could not move is left alone, and a node that others left to make room
# or to make it faster: what its steps and its blocks are then is known later.
PAUSE_S = 2.0


class MoveRounds:
    """``begin`` decides; call ``ended`` for each of its moves, whatever became of it."""

    def __init__(self, causes: Collection[str], *, tbt_s: float, block_size: int) -> None:
        """``causes``: the decisions that are made. ``tbt_s``: longest time wanted between two tokens."""
        self.in_flight: dict[str, Move] = {}  # by request
        self._causes = frozenset(causes)
        self._tbt_s = tbt_s
        self._block_size = block_size
        self._not_before_s: dict[str, float] = {}  # of requests, and of the nodes that they leave

    def begin(
        self,
        running: Sequence[Running],
        waiting: Sequence[Waiting],
        nodes: Sequence[NodeView],
        draining: Collection[str],
        targets: Sequence[NodeView],
        now_s: float,
    ) -> list[Move]:
        """Return the moves to begin, which are in flight then.

        ``nodes``: all that decode; ``draining``: those that requests should leave; ``targets``: those that
        requests may move to.
        """
        self._not_before_s = {name: at_s for name, at_s in self._not_before_s.items() if at_s > now_s}
        left_alone = self.in_flight.keys() | self._not_before_s.keys()
        running = [one for one in running if one.request_id not in left_alone]
        begun = []
        for move in self._decide(running, waiting, nodes, draining, targets, now_s):
            of_source = sum(other.source == move.source for other in self.in_flight.values())
            if len(self.in_flight) < _MOST and of_source < _MOST_FROM_ONE:
                self.in_flight[move.request_id] = move
                begun.append(move)
        return begun

    def ended(self, request_id: str, now_s: float, pause_s: float = PAUSE_S) -> None:
        """It has moved or not, and is left alone for ``pause_s``."""
        self._not_before_s[request_id] = now_s + pause_s
        del self.in_flight[request_id]

    def _decide(
        self,
        running: Sequence[Running],
        waiting: Sequence[Waiting],
        nodes: Sequence[NodeView],
        draining: Collection[str],
        targets: Sequence[NodeView],
        now_s: float,
    ) -> list[Move]:
        moves: list[Move] = []
        if draining and DRAIN in self._causes:
            moves += plan_drain(running, draining, targets, block_size=self._block_size, now_s=now_s)
        # The others see a node only when it has settled: free blocks and steps are not known in a move.
        busy = {move.source for move in (*self.in_flight.values(), *moves)} | set(draining)
        busy |= self._not_before_s.keys()
        settled = [one for one in running if one.node_id not in busy]
        closed = {view.node_id for view in nodes} - {view.node_id for view in targets}
        for plan in self._plans(waiting, closed, now_s):
            if found := plan(settled, nodes):
                self._not_before_s |= {move.source: now_s + PAUSE_S for move in found}
                return moves + found
        return moves

    def _plans(
        self, waiting: Sequence[Waiting], closed: Collection[str], now_s: float
    ) -> Iterator[Callable[[Sequence[Running], Sequence[NodeView]], list[Move]]]:
        """The decisions that are made, beside drain."""
        known: dict[str, Any] = {"closed": closed, "block_size": self._block_size, "now_s": now_s}
        if waiting and "priority" in self._causes:
            yield lambda running, nodes: plan_priority(running, waiting, nodes, **known)
        if waiting and "defragment" in self._causes:
            yield lambda running, nodes: plan_defragment(running, waiting, nodes, **known)
        if "hot-spot" in self._causes:
            yield partial(plan_hot_spots, tbt_s=self._tbt_s, **known)
