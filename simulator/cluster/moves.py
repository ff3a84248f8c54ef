"""Requests that leave their node, in virtual time: the conductor's decisions, and what a move takes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.conductor.costs.output_lengths import OutputLengths
from moonpool.conductor.migration.decisions import Move, Running, Waiting
from moonpool.conductor.migration.relief import plan_relief
from moonpool.conductor.migration.rounds import MoveRounds
from moonpool.conductor.requests.life import LOST, QUEUE
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.cluster.membership import Cluster
from moonpool.simulator.cluster.memory import PinnedBlocks
from moonpool.simulator.cluster.node import Node

_PERIOD_S = 0.25
# As in ``conductor.Migrator``.
_RELIEF_PAUSE_S = 5.0


@dataclass(slots=True)
class _Moving:
    """``hold``: its blocks on the target. ``attempt``: of the job; a later one has other nodes."""

    move: Move
    job: Job
    attempt: int
    source: Node
    target: Node
    hold: PinnedBlocks
    stopped: bool = False  # it has left the source's batch

    @property
    def void(self) -> bool:
        """Whether the request has ended, or goes on elsewhere from its lineage, or the target is gone."""
        return self.job.ended or self.job.attempt != self.attempt or not self.target.alive


class Moves:
    """``conductor.Migrator`` in virtual time: a round each quarter of a second while ``has_open_requests()``.

    A running request moves in two stages: its blocks while it goes on, then those of the tokens since, while
    it stands still.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        lengths: OutputLengths,
        *,
        causes: Collection[str],
        tbt_s: float,
        block_tokens: int,
        longest: int,
        has_open_requests: Callable[[], bool],
        on_replaced: Callable[[Job, str], None],
        on_moved: Callable[[Job, Node], None],
    ) -> None:
        """``on_replaced``: called for a job to place again, with the cause; ``on_moved``: with the node that
        decodes it now. ``longest``: most tokens of an answer."""
        self.num_moved = 0
        self.num_replaced = 0
        self._cluster = cluster
        self._clock = clock
        self._lengths = lengths
        self._relieves = "queue" in causes
        self._drains = "drain" in causes
        self._migrates = bool(set(causes) - {"queue", "drain"})
        self._rounds = MoveRounds(causes, tbt_s=tbt_s, block_size=block_tokens)
        self._block_tokens = block_tokens
        self._longest = longest
        self._has_open_requests = has_open_requests
        self._on_replaced = on_replaced
        self._on_moved = on_moved
        self._replaced_s: dict[Job, float] = {}
        if causes:
            clock.at(clock.now_s, self._round)

    def _round(self) -> None:
        now_s = self._clock.now_s
        if self._relieves:
            self._relieve(now_s)
        if self._migrates or (self._drains and self._has_leaving()):
            self._migrate(now_s)
        if self._has_open_requests():
            self._clock.at(now_s + _PERIOD_S, self._round)

    def _relieve(self, now_s: float) -> None:
        ends_s = now_s - _RELIEF_PAUSE_S
        for relief in plan_relief(self._cluster.prefill, now_s, stay=self._replaced_s):
            job = relief.key
            assert isinstance(job, Job)
            self._replaced_s[job] = now_s
            self.num_replaced += 1
            self._on_replaced(job, QUEUE)
        self._replaced_s = {job: at_s for job, at_s in self._replaced_s.items() if at_s > ends_s}

    # ------------------------------------------------------------------ running requests

    def _has_leaving(self) -> bool:
        """Whether a node has requests that it should hand on."""
        nodes = self._cluster.nodes
        return any(next(nodes[name].engine.decoding(), None) for name in self._cluster.handing_on())

    def _migrate(self, now_s: float) -> None:
        cluster = self._cluster
        jobs: dict[str, tuple[Job, int]] = {}  # and its tokens so far
        running, waiting = [], []
        for node_id, node in cluster.nodes.items():
            node.refresh()
            for job, produced in node.engine.decoding():
                name = str(job.number)
                so_far = job.num_produced + produced
                num_tokens = job.request.input_tokens + so_far
                left = self._longest - so_far
                expected = self._lengths.expected(job.request.input_tokens, so_far, max(left, 1))
                jobs[name] = job, num_tokens
                running.append(
                    Running(
                        name,
                        node_id,
                        num_tokens,
                        expected,
                        regions=job.request.regions,
                        region=node.view.region,
                    )
                )
            waiting += [
                Waiting(str(job.number), node_id, job.num_tokens, 0, True)
                for job in node.waiting_for_blocks()
            ]
        views = list(cluster.decode)
        for move in self._rounds.begin(running, waiting, views, cluster.handing_on(), views, now_s):
            self._begin(move, *jobs[move.request_id])

    def _begin(self, move: Move, job: Job, num_tokens: int) -> None:
        cluster, now_s = self._cluster, self._clock.now_s
        source, target = cluster.nodes[move.source], cluster.nodes[move.target]
        hold = target.reserve_for(job)
        if hold is None or job.decodes_in_place:
            if hold is not None:
                target.memory.release(hold)
            self._rounds.ended(move.request_id, now_s)
            return
        moving = _Moving(move, job, job.attempt, source, target, hold)
        lacks = num_tokens - len(hold.pinned) * self._block_tokens
        self._copy(moving, lacks, lambda: self._stop(moving, num_tokens))

    def _copy(self, moving: _Moving, num_tokens: int, then: Callable[[], None]) -> None:
        """Move the KV of ``num_tokens``, at least of a block; then go on, if the request still does."""

        def copied() -> None:
            if moving.void:
                self._give_up(moving)
            else:
                then()

        nbytes = max(num_tokens, self._block_tokens) * moving.source.hardware.kv_token_nbytes
        now_s, source, target = self._clock.now_s, moving.source.node_id, moving.target.node_id
        self._cluster.links.begin(source, target, nbytes, now_s)
        self._cluster.network.start(source, target, nbytes, copied)

    def _stop(self, moving: _Moving, num_copied: int) -> None:
        """End its steps on the source, and copy what it has produced meanwhile."""
        job, source = moving.job, moving.source

        def left(gaps_s: npt.NDArray[np.float64] | None) -> None:
            if gaps_s is None:
                self._give_up(moving)
                return
            moving.stopped = True
            source.refresh()  # counts its tokens before it leaves
            job.add_tokens(gaps_s)
            job.num_delivered += len(gaps_s)
            source.load.end_decode(job, job.num_delivered)
            self._copy(moving, job.num_tokens - num_copied, lambda: self._go_on(moving))

        source.engine.leave(job, left)

    def _go_on(self, moving: _Moving) -> None:
        job, target = moving.job, moving.target
        former, job.decode_hold = job.decode_hold, moving.hold
        target.jobs[job] = None
        tokens = self._lengths.expected(job.request.input_tokens, job.num_produced, self._longest)
        target.add_incoming(job, 0.0, tokens)
        moving.source.forget(job, former)
        self._cluster.ends(moving.source)
        self._on_moved(job, target)
        target.take_over(job)
        self.num_moved += 1
        self._rounds.ended(moving.move.request_id, self._clock.now_s)

    def _give_up(self, moving: _Moving) -> None:
        if moving.target.alive:
            moving.target.memory.release(moving.hold)
            moving.target.on_blocks_released()
        if moving.stopped and moving.job.attempt == moving.attempt:
            self._on_replaced(moving.job, LOST)
        self._rounds.ended(moving.move.request_id, self._clock.now_s)
