"""Moves running requests between decode nodes, as the decisions say and as operators ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

from moonpool.conductor.errors import MigrationFailed
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.migration.decisions import (
    DecodeLoad,
    Move,
    Running,
    Waiting,
    best_target,
    plan_defragment,
    plan_drain,
    plan_hot_spots,
    plan_priority,
)
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.requests.migration import Migrated, Movable
from moonpool.runtime.service.vital import restarted

log = logging.getLogger(__name__)

_PERIOD_S = 0.25
# Moves in flight at once: from one node, and in all. A storm would cost every stream a pause.
_MOST_FROM_ONE = 4
_MOST = 16
# How long a request that has moved or could not move is left alone, and a node that others left to make room
# or to make it faster: what its steps and its blocks are then is known later.
_PAUSE_S = 2.0
_SERVING = ("ready", "unhealthy")


class Migrator:
    """One round every quarter of a second, and at once when a node joins, leaves or changes its role."""

    def __init__(
        self,
        registry: NodeRegistry,
        runs: Mapping[str, Movable],
        *,
        causes: Collection[str],
        tbt_s: float,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        """``causes``: the decisions that are made; ``migrate`` works without. ``tbt_s``: longest time wanted
        between two tokens."""
        self._registry = registry
        self._runs = runs
        self._causes = frozenset(causes)
        self._tbt_s = tbt_s
        self._block_size = block_size
        self._clock = clock
        self._moves: dict[str, Move] = {}  # in flight, by request
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_before_s: dict[str, float] = {}  # of requests, and of the nodes that they leave
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._causes:
            self._task = restarted(self._run, "migrate requests")

    async def close(self) -> None:
        """Give up the moves in flight. Idempotent."""
        task, self._task = self._task, None
        tasks = [*self._tasks, *([task] if task is not None else [])]
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def in_flight(self) -> list[Move]:
        return list(self._moves.values())

    async def migrate(self, request_id: str, target_id: str, cause: str = "asked") -> Migrated:
        """Move a running request to the node ``target_id``; empty: to the best one.

        Raises MigrationFailed: it goes on where it was, or has ended.
        """
        run = self._runs.get(request_id)
        if run is None:
            raise MigrationFailed(request_id, target_id, "no request of this id runs here")
        if not target_id:
            target_id = self._best_target(request_id, run)
        target = self._registry.members.get(target_id)
        if target is None or not target.decodes:
            raise MigrationFailed(request_id, target_id, "no decode node has this name")
        return await run.migrate(target, cause)

    def _best_target(self, request_id: str, run: Movable) -> str:
        running = self._running(request_id, run)
        if running is None:
            raise MigrationFailed(request_id, "", "it does not decode now")
        members = self._registry.members.values()
        serving = [member.view for member in members if member.decodes and member.state in _SERVING]
        best = None
        # Where an operator asks, a node may do that warms up, or is left alone for being slow.
        for views in (self._registry.fleet("decode"), serving):
            # Others may wait there, perhaps only for the next step: free blocks suffice.
            loads = [replace(DecodeLoad.of(view), num_waiting=0) for view in views]
            best = best or best_target(running, loads, block_size=self._block_size, now_s=self._clock())
        if best is None:
            raise MigrationFailed(request_id, "", "no other node has room for it")
        return best.view.node_id

    def round(self) -> list[Move]:
        """Decide, and begin the moves that the bounds allow. Returns those."""
        now_s = self._clock()
        self._not_before_s = {name: at_s for name, at_s in self._not_before_s.items() if at_s > now_s}
        begun = []
        for move in self._decide(now_s):
            of_source = sum(other.source == move.source for other in self._moves.values())
            if len(self._moves) >= _MOST or of_source >= _MOST_FROM_ONE:
                continue
            self._moves[move.request_id] = move
            task = asyncio.create_task(self._move(move), name=f"move {move.request_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            begun.append(move)
        return begun

    def _decide(self, now_s: float) -> list[Move]:
        running, moves = self._all_running(), []
        open_nodes = list(self._registry.fleet("decode"))
        draining = {node_id for node_id, member in self._registry.members.items() if member.hands_on}
        if draining and "drain" in self._causes:
            moves += plan_drain(running, draining, open_nodes, block_size=self._block_size, now_s=now_s)
        # The others see a node only when it has settled: free blocks and steps are not known in a move.
        busy = {move.source for move in (*self._moves.values(), *moves)} | draining
        busy |= self._not_before_s.keys()
        nodes = [member.view for member in self._registry.members.values() if member.decodes]
        closed = {view.node_id for view in nodes} - {view.node_id for view in open_nodes}
        for plan in self._plans(closed, now_s):
            if found := plan([one for one in running if one.node_id not in busy], nodes):
                self._not_before_s |= {move.source: now_s + _PAUSE_S for move in found}
                return moves + found
        return moves

    def _plans(
        self, closed: Collection[str], now_s: float
    ) -> Iterator[Callable[[list[Running], list[NodeView]], list[Move]]]:
        """The decisions that are made, beside drain."""
        size, waiting = self._block_size, self._all_waiting()
        if waiting and "priority" in self._causes:
            yield lambda running, nodes: plan_priority(
                running, waiting, nodes, closed=closed, block_size=size, now_s=now_s
            )
        if waiting and "defragment" in self._causes:
            yield lambda running, nodes: plan_defragment(
                running, waiting, nodes, closed=closed, block_size=size, now_s=now_s
            )
        if "hot-spot" in self._causes:
            yield partial(plan_hot_spots, closed=closed, tbt_s=self._tbt_s, block_size=size, now_s=now_s)

    def _all_waiting(self) -> list[Waiting]:
        """Requests that have a decode node, and perhaps no blocks there."""
        found = []
        for request_id, run in self._runs.items():
            if (waits := run.waits_on) is not None:
                member, computed = waits
                found.append(Waiting(request_id, member.node_id, run.outlook()[0], run.priority, computed))
        return found

    def _all_running(self) -> list[Running]:
        """Requests that may move now."""
        found = []
        for request_id, run in self._runs.items():
            if request_id not in self._moves and request_id not in self._not_before_s:
                running = self._running(request_id, run)
                if running is not None:
                    found.append(running)
        return found

    def _running(self, request_id: str, run: Movable) -> Running | None:
        member = run.decodes_on
        if member is None:
            return None
        num_tokens, expected_tokens = run.outlook()
        return Running(request_id, member.node_id, num_tokens, expected_tokens, run.priority)

    async def _move(self, move: Move) -> None:
        try:
            await self.migrate(move.request_id, move.target, move.cause)
        except MigrationFailed as failure:
            log.info("%s", failure)
        finally:
            self._not_before_s[move.request_id] = self._clock() + _PAUSE_S
            del self._moves[move.request_id]

    async def _run(self) -> None:
        while True:
            self.round()
            await self._registry.change(_PERIOD_S)
