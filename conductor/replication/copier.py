"""Copies and releases hot prefixes on live nodes, within a bandwidth."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moonpool.conductor.admission.tenants import ANYONE, EVERYWHERE, Regions, Tenant, may_hold
from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.placing.estimates import longest_blocks
from moonpool.conductor.placing.node_view import NodeView
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
from moonpool.conductor.replication.heat import Heat, HotChain
from moonpool.conductor.replication.prefix_tree import CHAINS, prefix_tree, told
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.protos import node_pb2
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


@dataclass(slots=True)
class _Scope:
    """Prefixes of tenants that are confined to the same regions, and the copies made of them there."""

    regions: Regions
    heat: Heat = field(default_factory=Heat)
    made: list[Copy] = field(default_factory=list)


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
        self._scopes = {EVERYWHERE: _Scope(EVERYWHERE)}
        self._tree: list[dict[str, Any]] = []
        self._tree_until_s = -math.inf
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._makes_copies:
            self._task = restarted(self._run, "replicate hot prefixes")

    async def close(self) -> None:
        """Idempotent. Existing copies stay until nodes evict them."""
        await cancel_and_wait(self._task)

    def note(
        self,
        keys: Sequence[BlockKey],
        prefixes: Mapping[str, int],
        compute_s: float,
        client: Tenant = ANYONE,
        digests: Sequence[int] = (),
    ) -> None:
        """A request with these keys was placed; ``prefixes``: leading blocks of it on each node. ``digests``:
        see ``Heat.touch``."""
        heat = self._scope_of(client).heat
        heat.touch(keys[: longest_blocks(prefixes)], self._clock(), compute_s, digests)

    def count(self, keys: Sequence[BlockKey], num_used: int, client: Tenant) -> None:
        """See ``Heat.count``: once for each request, before ``note``."""
        self._scope_of(client).heat.count(keys, num_used, client.name)

    def _scope_of(self, client: Tenant) -> _Scope:
        scope = self._scopes.get(client.regions)
        if scope is None:
            scope = self._scopes[client.regions] = _Scope(client.regions)
        return scope

    def _hottest(self, count: int, now_s: float) -> list[tuple[_Scope, HotChain]]:
        """The hottest chains of all scopes, the hottest first."""
        chains = [
            (scope, chain) for scope in self._scopes.values() for chain in scope.heat.hottest(count, now_s)
        ]
        return sorted(chains, key=lambda one: -one[0].heat.uses(one[1], now_s))[:count]

    def hottest(self, count: int, *, used_again: bool) -> list[tuple[Regions, HotChain]]:
        """The hottest chains with the regions that they are confined to. ``used_again``: those alone that
        were used more than once lately."""
        now_s = self._clock()
        return [
            (scope.regions, chain)
            for scope, chain in self._hottest(count, now_s)
            if not used_again or scope.heat.uses(chain, now_s) >= USED_AGAIN
        ]

    def tree(self) -> list[dict[str, Any]]:
        """The hottest prefixes, for the dashboard: see ``prefix_tree.told``. Up to ``_TREE_S`` old."""
        now_s, mirror = self._clock(), self._registry.mirror
        if now_s >= self._tree_until_s:
            root = prefix_tree([chain for _, chain in self._hottest(CHAINS, now_s)])
            # All scopes forget alike.
            rate = partial(self._scopes[EVERYWHERE].heat.uses_per_s, now_s=now_s)
            self._tree = told(root, rate, mirror.longest_prefix, mirror.tiers_of)
            self._tree_until_s = now_s + _TREE_S
        return self._tree

    async def round(self) -> None:
        """Plan and carry out one round. A failed copy is repeated by a later round if it is still wanted."""
        layout = self._registry.layout
        if layout is None:
            return
        budget_nbytes = self._budget.nbytes(_PERIOD_S, layout.block_nbytes)
        for scope in list(self._scopes.values()):
            budget_nbytes -= await self._round_of(scope, layout.block_nbytes, budget_nbytes)

    async def _round_of(self, scope: _Scope, block_nbytes: int, budget_nbytes: float) -> float:
        """One round of one scope, among the nodes of its regions. Returns the bytes it was to copy."""
        registry, now_s = self._registry, self._clock()
        fleet = registry.fleet("prefill", scope.regions)
        if not len(fleet):
            return 0.0
        holders = partial(registry.holders, regions=scope.regions)
        for copy in plan_release(scope.heat, scope.made, holders, fleet, now_s=now_s):
            scope.made.remove(copy)
            if holders(copy.keys).get(copy.target, 0) >= len(copy.keys):
                await self._release(copy)
        shape = Shape(self._block_size, block_nbytes)
        copies = plan_replication(
            scope.heat,
            holders,
            fleet,
            self._cost_model.links,
            shape,
            budget_nbytes=budget_nbytes,
            now_s=now_s,
        )
        budget_nbytes -= sum(copy.nbytes for copy in copies)
        stores = registry.stores(scope.regions)
        stored = plan_store_copies(
            scope.heat,
            holders,
            stores,
            shape,
            budget_nbytes=budget_nbytes,
            now_s=now_s,
            is_free=self._cost_model.links.is_free,
        )
        nbytes = sum(copy.nbytes for copy in [*copies, *stored])
        self._budget.spend(nbytes)
        by_target: dict[str, list[Copy]] = {}
        for copy in [*copies, *stored]:
            by_target.setdefault(copy.target, []).append(copy)

        async def in_order(copies: Sequence[Copy]) -> list[Copy]:
            # Later copies to a target may need blocks of earlier ones.
            return [copy for copy in copies if await self._copy(scope, copy)]

        made = await asyncio.gather(*map(in_order, by_target.values()))
        # Copies on store nodes need no release: the nodes evict unused blocks.
        for copy in itertools.chain.from_iterable(made):
            if copy in copies:
                add_copy(scope.made, copy)
        return nbytes

    def newcomer(self, node_id: str) -> Awaitable[object] | None:
        """Copies of the hottest prefixes to a prefill node that has just joined; None: none are to be made.

        To be awaited before it gets requests. They end within some seconds, whatever happens.
        """
        registry, layout = self._registry, self._registry.layout
        if layout is None or not self._makes_copies:
            return None
        shape, region = Shape(self._block_size, layout.block_nbytes), registry.members[node_id].record.region
        left_nbytes, planned = self._warm_nbytes, list[tuple[_Scope, Copy]]()
        for scope in self._scopes.values():
            if may_hold(scope.regions, region):
                copies = plan_warming(
                    scope.heat,
                    partial(registry.holders, regions=scope.regions),
                    node_id,
                    shape,
                    budget_nbytes=left_nbytes,
                    now_s=self._clock(),
                    is_free=self._cost_model.links.is_free,
                )
                left_nbytes -= sum(copy.nbytes for copy in copies)
                planned += ((scope, copy) for copy in copies)
        return self._warm(node_id, planned) if planned else None

    async def _warm(self, node_id: str, planned: Sequence[tuple[_Scope, Copy]]) -> None:
        ends_s = self._clock() + _WARM_S
        for scope, copy in planned:
            left_s = ends_s - self._clock()
            if left_s <= 0:
                break
            try:
                async with asyncio.timeout(left_s):
                    made = await self._copy(scope, copy)
            except TimeoutError:
                log.info("%s was not warmed any further: %g s have passed", node_id, _WARM_S)
                break
            if made:
                core_metrics.warmed_blocks.inc(copy.num_blocks)
                add_copy(scope.made, copy)

    async def hand_on(self, node_id: str) -> None:
        """Copy the hot prefixes that no other node has from a node that is about to end, the hottest first.

        ``node_id``: of the node, with all its replicas. Ends within some seconds; what could not be copied is
        counted as lost.
        """
        registry, now_s = self._registry, self._clock()
        names = {name for name, member in registry.members.items() if member.owner == node_id}
        layout = registry.layout
        if not names or layout is None:
            return
        ends_s = now_s + _HAND_ON_S
        for scope, chain in self._hottest(_HANDED_ON, now_s):
            held, length = registry.holders(chain.keys, scope.regions), len(chain.keys)
            have = {name for name, blocks in held.items() if blocks >= length}
            if scope.heat.uses(chain, now_s) < USED_AGAIN or not have or have - names:
                continue
            fleet = registry.fleet("prefill", scope.regions)
            targets = [view for view in fleet if view.node_id not in names]
            idle = min(targets, key=partial(self._cost_to_keep, min(have), held), default=None)
            num_blocks = length - (held.get(idle.node_id, 0) if idle is not None else 0)
            made = False
            if idle is not None and self._makes_copies and self._clock() < ends_s:
                nbytes = num_blocks * layout.block_nbytes
                copy = Copy(min(have), idle.node_id, chain.keys, num_blocks, nbytes, chain.keys[-1])
                made = await self._copy(scope, copy)
            if not made:
                core_metrics.hot_lost_blocks.inc(num_blocks)

    def _cost_to_keep(self, source: str, held: Mapping[str, int], view: NodeView) -> tuple[bool, int, int]:
        """The order of nodes to take over a prefix: where bytes are free, and with most of it, first."""
        is_free = self._cost_model.links.is_free(source, view.node_id)
        return not is_free, -held.get(view.node_id, 0), view.num_placed

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.round()

    async def _copy(self, scope: _Scope, copy: Copy) -> bool:
        """Returns whether anything was copied."""
        members = self._registry.members
        source, target = members.get(copy.source), members.get(copy.target)
        if source is None or target is None or (address := source.kv_address) is None:
            return False
        # Since it was planned, a node may have left and another one elsewhere may have its name.
        if not all(may_hold(scope.regions, one.record.region) for one in (source, target)):
            return False
        return await self.read(copy, address)

    async def read(self, copy: Copy, address: node_pb2.KvAddress, *, surplus: bool = True) -> bool:
        """Have the target of ``copy`` read it from ``address``, of a node of this cluster or another one.

        ``surplus``: see ``NodeClient.replicate``. Returns whether anything was copied.
        """
        target, links = self._registry.members.get(copy.target), self._cost_model.links
        if target is None:
            return False
        links.begin(copy.source, copy.target, copy.nbytes, self._clock())
        try:
            reply = await target.client.replicate(address, copy.keys, _DEADLINE_S, surplus=surplus)
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
