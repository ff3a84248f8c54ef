"""Copies of hot prefixes in the simulated cluster, planned by the conductor's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.conductor.placing.estimates import longest_blocks
from moonpool.conductor.placing.placement import Placement
from moonpool.conductor.replication.copy_plan import (
    Budget,
    Copy,
    Shape,
    add_copy,
    plan_release,
    plan_replication,
)
from moonpool.conductor.replication.heat import Heat
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.membership import Cluster
from moonpool.simulator.cluster.memory import PinnedBlocks

_PERIOD_S = 1.0


class HotPrefixCopies:
    """``conductor.Replicator`` in virtual time: plans once a second while ``has_open_requests()``."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        *,
        nbytes_per_s: float,
        block_tokens: int,
        has_open_requests: Callable[[], bool],
    ) -> None:
        """``nbytes_per_s``: for all copies together; 0: no copies."""
        self.num_made = 0
        self.num_released = 0
        self._cluster = cluster
        self._clock = clock
        self._makes_copies = nbytes_per_s > 0
        self._budget = Budget(nbytes_per_s)
        self._shape = Shape(block_tokens, cluster.block_nbytes)
        self._has_open_requests = has_open_requests
        self._heat = Heat()
        self._made: list[Copy] = []
        if nbytes_per_s:
            clock.at(clock.now_s + _PERIOD_S, self._round)

    def note(self, keys: Sequence[bytes], placement: Placement) -> None:
        """Count a placed request."""
        if self._makes_copies:
            chain = [BlockKey(key) for key in keys]
            held = longest_blocks(self._cluster.holders(chain))
            self._heat.touch(chain[:held], self._clock.now_s, placement.prefill.compute_s)

    def _round(self) -> None:
        cluster, now_s = self._cluster, self._clock.now_s
        for copy in plan_release(self._heat, self._made, cluster.holders, cluster.prefill, now_s=now_s):
            self._made.remove(copy)
            if (node := cluster.nodes.get(copy.target)) is not None:
                self.num_released += bool(node.memory.drop(copy.keys, copy.num_blocks))
        for copy in plan_replication(
            self._heat,
            cluster.holders,
            cluster.prefill,
            cluster.links,
            self._shape,
            budget_nbytes=self._budget.nbytes(_PERIOD_S, self._shape.block_nbytes),
            now_s=now_s,
        ):
            self._budget.spend(copy.nbytes)
            self._copy(copy)
        if self._has_open_requests():
            self._clock.at(now_s + _PERIOD_S, self._round)

    def _copy(self, copy: Copy) -> None:
        source, target = self._cluster.nodes[copy.source], self._cluster.nodes[copy.target]
        held = PinnedBlocks()
        source.memory.pin(held, copy.keys)

        def copied() -> None:
            if source.alive:
                source.memory.release(held)
                source.on_blocks_released()
            if target.alive and not source.failed:
                arrived = PinnedBlocks()
                target.memory.bring(arrived, copy.keys)
                target.memory.release(arrived)
                add_copy(self._made, copy)
                self.num_made += 1

        self._cluster.links.begin(copy.source, copy.target, copy.nbytes, self._clock.now_s)
        self._cluster.network.start(copy.source, copy.target, copy.nbytes, copied)
