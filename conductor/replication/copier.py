"""Copies and releases hot prefixes on live nodes, within a bandwidth."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.placing.estimates import longest_blocks
from moonpool.conductor.replication.copy_plan import (
    USED_AGAIN,
    Budget,
    Copy,
    Shape,
    add_copy,
    plan_release,
    plan_replication,
    plan_store_copies,
    plan_warming,
)
from moonpool.conductor.replication.heat import Heat
from moonpool.conductor.replication.prefix_tree import CHAINS, prefix_tree, told
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

_PERIOD_S = 1.0
# A tree takes some milliseconds, and snapshots for the dashboard are made every second.
_TREE_S = 4.5
_DEADLINE_S = 10.0
# For the copies from a node that is about to end, and the prefixes that are considered.
_HAND_ON_S = 5.0
_HANDED_ON = 64
# How long a node that has joined may wait for its first prefixes.
_WARM_S = 2.0


class Replicator:
    """One round a second. Rounds do not overlap: each sees the effects of the last one in the index."""

    def __init__(
        self,
        registry: NodeRegistry,
        cost_model: CostModel,
        *,
        nbytes_per_s: float,
        block_size: int,
        clock: Callable[[], float],
        on_copied: Callable[[str, str], None] = lambda target, sentence: None,
    ) -> None:
        """``nbytes_per_s``: for all copies together; 0: no copies. ``on_copied``: called for each copy."""
        self._registry = registry
        self._cost_model = cost_model
        self._makes_copies = nbytes_per_s > 0
        self._budget = Budget(nbytes_per_s)
        self._warm_nbytes = nbytes_per_s * _WARM_S  # for each newcomer, beside the budget
        self._block_size = block_size
        self._clock = clock
        self._on_copied = on_copied
        self._heat = Heat()
        self._made: list[Copy] = []
        self._tree: list[dict[str, Any]] = []
        self._tree_until_s = -math.inf
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._makes_copies:
            self._task = restarted(self._run, "replicate hot prefixes")

    async def close(self) -> None:
        """Idempotent. Existing copies stay until nodes evict them."""
        task, self._task = self._task, None
        await cancel_and_wait(task)

    def note(self, keys: Sequence[BlockKey], prefixes: Mapping[str, int], compute_s: float) -> None:
        """A request with these keys was placed; ``prefixes``: leading blocks of it on each node."""
        self._heat.touch(keys[: longest_blocks(prefixes)], self._clock(), compute_s)

    def count(self, keys: Sequence[BlockKey], num_used: int, tenant: str) -> None:
        """See ``Heat.count``: once for each request, before ``note``."""
        self._heat.count(keys, num_used, tenant)

    def tree(self) -> list[dict[str, Any]]:
        """The hottest prefixes, for the dashboard: see ``prefix_tree.told``. Up to ``_TREE_S`` old."""
        now_s, heat, mirror = self._clock(), self._heat, self._registry.mirror
        if now_s >= self._tree_until_s:
            root = prefix_tree(heat.hottest(CHAINS, now_s))
            rate = partial(heat.uses_per_s, now_s=now_s)
            self._tree = told(root, rate, mirror.longest_prefix, mirror.tiers_of)
            self._tree_until_s = now_s + _TREE_S
        return self._tree

    async def round(self) -> None:
        """Plan and carry out one round. A failed copy is repeated by a later round if it is still wanted."""
        registry, now_s = self._registry, self._clock()
        layout = registry.layout
        fleet = registry.fleet("prefill")
        if layout is None or not len(fleet):
            return
        for copy in plan_release(self._heat, self._made, registry.holders, fleet, now_s=now_s):
            self._made.remove(copy)
            if registry.holders(copy.keys).get(copy.target, 0) >= len(copy.keys):
                await self._release(copy)
        shape = Shape(self._block_size, layout.block_nbytes)
        budget_nbytes = self._budget.nbytes(_PERIOD_S, layout.block_nbytes)
        copies = plan_replication(
            self._heat,
            registry.holders,
            fleet,
            self._cost_model.links,
            shape,
            budget_nbytes=budget_nbytes,
            now_s=now_s,
        )
        budget_nbytes -= sum(copy.nbytes for copy in copies)
        stored = plan_store_copies(
            self._heat, registry.holders, registry.stores(), shape, budget_nbytes=budget_nbytes, now_s=now_s
        )
        self._budget.spend(sum(copy.nbytes for copy in [*copies, *stored]))
        by_target: dict[str, list[Copy]] = {}
        for copy in [*copies, *stored]:
            by_target.setdefault(copy.target, []).append(copy)
        made = await asyncio.gather(*map(self._copy_in_order, by_target.values()))
        # Copies on store nodes need no release: the nodes evict unused blocks.
        for copy in itertools.chain.from_iterable(made):
            if copy in copies:
                add_copy(self._made, copy)

    def newcomer(self, node_id: str) -> Awaitable[object] | None:
        """Copies of the hottest prefixes to a prefill node that has just joined; None: none are to be made.

        To be awaited before it gets requests. They end within some seconds, whatever happens.
        """
        registry, layout = self._registry, self._registry.layout
        if layout is None or not self._makes_copies:
            return None
        shape = Shape(self._block_size, layout.block_nbytes)
        copies = plan_warming(
            self._heat,
            registry.holders,
            node_id,
            shape,
            budget_nbytes=self._warm_nbytes,
            now_s=self._clock(),
        )
        return self._warm(node_id, copies) if copies else None

    async def _warm(self, node_id: str, copies: Sequence[Copy]) -> None:
        ends_s = self._clock() + _WARM_S
        for copy in copies:
            left_s = ends_s - self._clock()
            if left_s <= 0:
                break
            try:
                async with asyncio.timeout(left_s):
                    made = await self._copy(copy)
            except TimeoutError:
                log.info("%s was not warmed any further: %g s have passed", node_id, _WARM_S)
                break
            if made:
                core_metrics.warmed_blocks.inc(copy.num_blocks)
                add_copy(self._made, copy)

    async def hand_on(self, node_id: str) -> None:
        """Copy the hot prefixes that no other node has from a node that is about to end, the hottest first.

        ``node_id``: of the node, with all its replicas. Ends within some seconds; what could not be copied is
        counted as lost.
        """
        registry, now_s = self._registry, self._clock()
        names = {name for name, member in registry.members.items() if member.owner == node_id}
        layout = registry.layout
        targets = [view for view in registry.fleet("prefill") if view.node_id not in names]
        if not names or layout is None:
            return
        ends_s = now_s + _HAND_ON_S
        for chain in self._heat.hottest(_HANDED_ON, now_s):
            held, length = registry.holders(chain.keys), len(chain.keys)
            have = {name for name, blocks in held.items() if blocks >= length}
            if self._heat.uses(chain, now_s) < USED_AGAIN or not have or have - names:
                continue
            idle = min(targets, key=lambda view: (-held.get(view.node_id, 0), view.num_placed), default=None)
            num_blocks = length - (held.get(idle.node_id, 0) if idle is not None else 0)
            made = False
            if idle is not None and self._clock() < ends_s:
                nbytes = num_blocks * layout.block_nbytes
                made = await self._copy(
                    Copy(min(have), idle.node_id, chain.keys, num_blocks, nbytes, chain.keys[-1])
                )
            if not made:
                core_metrics.hot_lost_blocks.inc(num_blocks)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.round()

    async def _copy_in_order(self, copies: Sequence[Copy]) -> list[Copy]:
        """Make copies to one target: later ones may need blocks of earlier ones. Returns the made ones."""
        return [copy for copy in copies if await self._copy(copy)]

    async def _copy(self, copy: Copy) -> bool:
        """Returns whether anything was copied."""
        members = self._registry.members
        source, target = members.get(copy.source), members.get(copy.target)
        if source is None or target is None or (address := source.kv_address) is None:
            return False
        links, now_s = self._cost_model.links, self._clock()
        links.begin(copy.source, copy.target, copy.nbytes, now_s)
        try:
            reply = await target.client.replicate(address, copy.keys, _DEADLINE_S)
        except MoonpoolError as error:
            core_metrics.hot_copies.labels("failed").inc()
            log.info("%d hot blocks were not copied to %s: %s", copy.num_blocks, copy.target, error)
            return False
        if reply.num_read:
            core_metrics.hot_copies.labels("made").inc()
            core_metrics.hot_nbytes.inc(reply.nbytes)
            took = f"{reply.nbytes / 1e6:.1f} MB in {1e3 * reply.seconds:.0f} ms"
            self._on_copied(
                copy.target, f"{reply.num_read:,} blocks of a hot prefix from {copy.source}, {took}"
            )
        return bool(reply.num_read)

    async def _release(self, copy: Copy) -> None:
        member = self._registry.members.get(copy.target)
        if member is None:
            return
        try:
            num_blocks = await member.client.evict(copy.keys, copy.num_blocks, _DEADLINE_S)
        except MoonpoolError as error:
            log.info("%d blocks stay on %s: %s", copy.num_blocks, copy.target, error)
            return
        core_metrics.hot_copies.labels("released").inc()
        core_metrics.hot_released_blocks.inc(num_blocks)
