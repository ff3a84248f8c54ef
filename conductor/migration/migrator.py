"""Moves running requests between decode nodes, as the decisions say and as operators ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from moonpool.conductor.errors import MigrationFailed
from moonpool.conductor.fleet.node_client import RequestKey
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.migration.decisions import (
    ASKED,
    DRAIN,
    DecodeNodes,
    Move,
    Running,
    Waiting,
)
from moonpool.conductor.migration.relief import plan_relief
from moonpool.conductor.migration.rounds import PAUSE_S, MoveRounds
from moonpool.conductor.requests.migration import Migrated, Movable
from moonpool.kvstore.index.redis.node_record import stages_of
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

_PERIOD_S = 0.25
# A prompt that was placed again stays there for so long: what is before it is known better later.
_RELIEF_PAUSE_S = 5.0
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
        self._block_size = block_size
        self._clock = clock
        self._rounds = MoveRounds(causes, tbt_s=tbt_s, block_size=block_size)
        self._tasks: set[asyncio.Task[None]] = set()
        self._replaced: dict[tuple[str, int], float] = {}  # keys of prefills that were placed again, and when
        self._asked: list[Move] = []  # in flight, and no decision of ``_rounds``
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._causes:
            self._task = restarted(self._run, "migrate requests")

    async def close(self) -> None:
        """Give up the moves in flight. Idempotent."""
        await cancel_and_wait(self._task, *self._tasks)

    @property
    def in_flight(self) -> list[Move]:
        return [*self._rounds.in_flight.values(), *self._asked]

    async def migrate(self, request_id: str, target_id: str, cause: str = ASKED) -> Migrated:
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
        if target.gated:
            raise MigrationFailed(request_id, target_id, "a rollout watches it before it gets requests")
        source = run.decodes_on
        if cause != ASKED or source is None:
            return await run.migrate(target, cause)
        move = Move(request_id, source.node_id, target_id, cause, "an operator asked for it")
        self._asked.append(move)
        try:
            return await run.migrate(target, cause)
        finally:
            self._asked.remove(move)

    def _best_target(self, request_id: str, run: Movable) -> str:
        running = self._running(request_id, run)
        if running is None:
            raise MigrationFailed(request_id, "", "it does not decode now")
        members = self._registry.members.values()
        serving = [
            member.view
            for member in members
            if member.decodes and member.state in _SERVING and not member.gated
        ]
        best = None
        # Where an operator asks, a node may do that warms up, or is left alone for being slow.
        for views in (self._registry.fleet("decode"), serving):
            nodes = DecodeNodes(views, block_size=self._block_size, now_s=self._clock())
            # Others may wait there, perhaps only for the next step: free blocks suffice.
            best = best or nodes.best_target(running, crowded=True)
        if best is None:
            raise MigrationFailed(request_id, "", "no other node has room for it")
        return best.node_id

    def round(self) -> list[Move]:
        """Decide, and begin the moves that the bounds allow. Returns those."""
        now_s = self._clock()
        if "queue" in self._causes:
            self._relieve(now_s)
        registry = self._registry
        members = registry.members
        begun = self._rounds.begin(
            self._all_running(),
            self._all_waiting(),
            [member.view for member in members.values() if member.decodes],
            {node_id for node_id, member in members.items() if member.hands_on},
            # A request that moves brings its cache along: a node that warms up serves it as well.
            registry.serving("decode"),
            now_s,
        )
        for move in begun:
            task = asyncio.create_task(self._move(move), name=f"move {move.request_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return begun

    def _relieve(self, now_s: float) -> None:
        """Have prompts that wait placed again where that is much sooner."""
        members, fleet = self._registry.members, self._registry.fleet("prefill")
        nodes = [one.view for one in members.values() if "prefill" in stages_of(one.record.role)]

        def room(node_id: str) -> float:
            member = members[node_id]
            return member.breaker.room(member.load.num_requests) if fleet.get(node_id) is not None else 0

        for relief in plan_relief(nodes, now_s, stay=self._replaced.keys() | self._confined(), room=room):
            assert isinstance(relief.key, tuple)
            request_id, attempt = relief.key
            if (run := self._runs.get(request_id)) is not None:
                self._replaced[request_id, attempt + 1] = now_s
                run.place_again(f"another node would begin {relief.gain_s:.1f} s before {relief.source}")
        ends_s = now_s - _RELIEF_PAUSE_S
        self._replaced = {key: at_s for key, at_s in self._replaced.items() if at_s > ends_s}

    def _confined(self) -> set[RequestKey]:
        """Prefills of confined requests: the nodes with short queues may be where these must not go."""
        found = (run.prefill_key for run in self._runs.values() if run.client.regions)
        return {key for key in found if key is not None}

    def _all_waiting(self) -> list[Waiting]:
        """Requests that have a decode node, and perhaps no blocks there."""
        found = []
        for request_id, run in self._runs.items():
            if (waits := run.waits_on) is not None:
                member, computed = waits
                found.append(Waiting(request_id, member.node_id, run.outlook()[0], run.priority, computed))
        return found

    def _all_running(self) -> list[Running]:
        """Requests that decode."""
        found = (self._running(request_id, run) for request_id, run in self._runs.items())
        return [one for one in found if one is not None]

    def _running(self, request_id: str, run: Movable) -> Running | None:
        member = run.decodes_on
        if member is None:
            return None
        num_tokens, expected_tokens = run.outlook()
        return Running(
            request_id,
            member.node_id,
            num_tokens,
            expected_tokens,
            run.priority,
            run.client.regions,
            member.view.region,
        )

    async def _move(self, move: Move) -> None:
        pause_s = PAUSE_S
        try:
            await self.migrate(move.request_id, move.target, move.cause)
        except MigrationFailed as failure:
            log.info("%s", failure)
            if move.cause == DRAIN:
                pause_s = _PERIOD_S
        finally:
            self._rounds.ended(move.request_id, self._clock(), pause_s)
        if move.cause == DRAIN:
            self.round()  # the next one leaves at once

    async def _run(self) -> None:
        while True:
            self.round()
            await self._registry.change(_PERIOD_S)
