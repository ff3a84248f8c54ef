"""What operators and the planner do with the fleet: list and scale it, switch and drain nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from moonpool.conductor.engines.client import EngineClient
from moonpool.conductor.fleet.errors import FleetUnchanged, NodeMissing, ProviderFailed
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.providers.provider import (
    STOPPING,
    Provider,
    SuppliedNode,
    SwitchingProvider,
    VersionedProvider,
)
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.fleet.removal import Removable, least_missed
from moonpool.kvstore.index.redis.engine_facts import is_engine
from moonpool.kvstore.index.redis.node_record import ROLES, STAGES, NodeRecord, stages_of
from moonpool.runtime.errors import MoonpoolError

log = logging.getLogger(__name__)

MAX_NODES = 1024
"""Most nodes of a role that one call may ask for."""


class FleetAdmin:
    """Changes are made one after the other. ``provider``: None where others start and stop nodes."""

    def __init__(
        self,
        registry: NodeRegistry,
        provider: Provider | None,
        model: str,
        clock: Callable[[], float],
        on_change: Callable[[str, str, str], None],
        *,
        planned: bool = False,
    ) -> None:
        """``planned``: a planner changes the number of nodes, operators do not. ``on_change``: called with
        the kind of each change (``started``, ``switches`` or ``drained``), a node and why.
        """
        self.provider = provider
        self._registry = registry
        self.model = model
        self._clock = clock
        self._on_change = on_change
        self._planned = planned
        self._turn = asyncio.Lock()
        self.before_stop: Callable[[str], Awaitable[None]] = _nothing  # called with a node that will end

    async def close(self) -> None:
        """Idempotent."""
        if self.provider is not None:
            await self.provider.close()

    async def listed(self) -> dict[str, Any]:
        """For ``GET /v1/fleet``: plain JSON types. ``nodes``: those of the index and those of the provider,
        by name. ``supplied``: as the provider knows it; None: it was started by others.
        """
        supplied, trouble = [], ""
        try:
            supplied = list(await self.supplied())
        except ProviderFailed as error:
            trouble = str(error)
        nodes: dict[str, dict[str, Any]] = {}
        for member in self._registry.members.values():
            record = member.record
            name = member.owner
            node = nodes.setdefault(
                name,
                {"node_id": name, "role": record.role, "states": [], "num_requests": 0, "supplied": None},
            )
            node["states"].append(member.state)
            node["region"], node["zone"] = record.region, record.zone
            node["join"] = record.extra.get("join", {})
            node["num_requests"] += record.load.num_running + record.load.num_waiting
        for one in supplied:
            empty = {"node_id": one.node_id, "role": one.role, "states": [], "num_requests": 0}
            nodes.setdefault(one.node_id, empty)["supplied"] = asdict(one)
        return {
            "provider": self.provider.name if self.provider else None,
            "trouble": trouble,
            "nodes": [nodes[name] for name in sorted(nodes)],
        }

    async def scale(self, role: str, count: int) -> dict[str, Any]:
        """Have the provider run ``count`` nodes of ``role``. Returns the names of nodes asked to start and to
        stop: the ones with the least used cached blocks.

        Raises:
            FleetUnchanged: there is no provider, or no such role, or ``count`` is out of range.
            ProviderFailed: it failed; changes made before stay, and the text names them.
        """
        if role not in ROLES:
            raise FleetUnchanged(f"there are no {role[:32]!r} nodes to scale; roles are {', '.join(ROLES)}")
        if not 1 <= count <= MAX_NODES:
            raise FleetUnchanged(f"the number of {role} nodes must be from 1 to {MAX_NODES}, got {count}")
        self._refuse_if_planned(role)
        async with self._turn:
            if self.provider is None:
                raise FleetUnchanged(
                    "this conductor has no provider that starts or stops nodes (fleet.provider): start and "
                    "drain them yourself"
                )
            live = await self._live(role)
            started: list[str] = []
            stopped: list[str] = []
            try:
                for _ in range(count - len(live)):
                    started.append(await self.start(role, "an operator asked for it"))
                # Listed anew each time: some go only after others.
                while len(live) > count and (able := [one for one in live if one.can_stop]):
                    node = least_missed([self.removable(one.node_id) for one in able])[0]
                    await self.stop(node.node_id, "an operator asked for fewer nodes")
                    stopped.append(node.node_id)
                    live = [one for one in await self._live(role) if one.node_id not in stopped]
            except ProviderFailed as error:
                done = ", ".join([*started, *stopped]) or "nothing"
                raise ProviderFailed(f"{error}. Changed before: {done}") from error
            return {"role": role, "count": count, "started": started, "stopped": stopped}

    async def switch_role(self, node_id: str, role: str) -> dict[str, Any]:
        """Have a node change its role in place. Returns its former role, and the requests of that role that
        still run there; they end there or move on.

        Raises:
            NodeMissing: the index has no such node.
            FleetUnchanged: there is no such role, or the node cannot have it.
            ProviderFailed: the call failed; some replicas of the node may have the new role.
        """
        if role not in ROLES:
            raise FleetUnchanged(f"no node becomes {role[:32]!r}; roles are {', '.join(ROLES)}")
        self._refuse_if_planned(role)
        async with self._turn:
            members = self._members_of(node_id)
            former = members[0].record.role
            left = await self.switch(members[0].owner, role, "an operator asked for it")
            return {"node_id": node_id, "role": role, "former": former, "num_requests": left}

    async def switch_model(self, node_id: str, target: FleetAdmin) -> dict[str, Any]:
        """Have a node drain, and serve the model of ``target`` from then on. Answers when it was told.

        Raises:
            NodeMissing: the index has no such node.
            FleetUnchanged: planners decide it, or the provider does not do that, or did not start the node.
            ProviderFailed: the call failed, or the model does not fit on that machine: nothing was changed.
        """
        for one in (self, target):
            one._refuse_if_planned(self._members_of(node_id)[0].record.role)
        async with self._turn:
            members = self._members_of(node_id)
            count = sum(one.record.load.num_running + one.record.load.num_waiting for one in members)
            await self.lend(members[0].owner, target.model, "an operator asked for it")
            left = {one.owner for one in self._registry.members.values()} - {members[0].owner}
            return {
                "node_id": members[0].owner,
                "model": target.model,
                "former": self.model,
                "num_requests": count,
                "num_left": len(left),
            }

    async def drain(self, node_id: str) -> dict[str, Any]:
        """Have a node finish its requests and end. Returns who ends it: the provider, or the node itself.

        Raises:
            NodeMissing: neither the index nor the provider has it.
            FleetUnchanged: it is an engine that takes no such call.
            ProviderFailed: the call failed.
        """
        async with self._turn:
            supplied = {node.node_id: node for node in await self.supplied()}
            # Of a replica the provider knows its node alone.
            owners = {one.node_id: one.owner for one in self._registry.members.values()}
            node_id = owners.get(node_id, node_id)
            if node_id in supplied and self.provider is not None:
                if supplied[node_id].counts:
                    await self.stop(node_id, "an operator drained it")
                elif supplied[node_id].state != STOPPING:
                    raise NodeMissing(f"{node_id[:128]} has ended: {supplied[node_id].reason}")
                return {"node_id": node_id, "by": self.provider.name}
            members = self._members_of(node_id)
            if isinstance(members[0].client, EngineClient):
                raise FleetUnchanged(
                    f"{node_id} is an engine of another project: end it where it was started"
                )
            # The Drain call of one replica drains its whole node.
            try:
                await members[0].client.drain()
            except MoonpoolError as error:
                raise ProviderFailed(f"{node_id} was not drained: {error}") from error
            self._on_change("drained", node_id, "an operator drained it")
            return {"node_id": node_id, "by": "node"}

    # ------------------------------------------------------------------ steps, for operators and the planner

    async def start(
        self, role: str, why: str, *, fence: int = 0, settings: Sequence[str] = (), rollout: int = 0
    ) -> str:
        """``fence``: the epoch of the planner's lease; 0: an operator's. ``rollout``: that of the rollout
        which asks, with ``settings`` for this node alone. Raises ``ProviderFailed``."""
        assert self.provider is not None
        if rollout and isinstance(self.provider, VersionedProvider):
            node_id = await self.provider.start(role, self.model, settings=settings, rollout=rollout)
        else:
            node_id = await self.provider.start(role, self.model, fence)
        log.info("%s starts%s: %s", node_id, f" with {', '.join(settings)}" if settings else "", why)
        self._on_change("started", node_id, why)
        return node_id

    async def stop(self, node_id: str, why: str, *, fence: int = 0, rollout: int = 0) -> None:
        """``fence`` and ``rollout``: as in ``start``. Raises ``ProviderFailed``."""
        assert self.provider is not None
        await self.before_stop(node_id)
        if rollout and isinstance(self.provider, VersionedProvider):
            await self.provider.stop(node_id, rollout=rollout)
        else:
            await self.provider.stop(node_id, fence)
        log.info("%s drains and ends: %s", node_id, why)
        self._on_change("drained", node_id, why)

    async def switch(self, node_id: str, role: str, why: str) -> int:
        """Switch all replicas of a node; ``node_id``: of the node. Returns the requests of the former role
        that still run. Raises as ``switch_role``.
        """
        members = self._members_of(node_id)
        former = members[0].record.role
        for one in members:
            if is_engine(one.record):
                raise FleetUnchanged(
                    f"{node_id} is an engine of another project: start it again as a {role} one where it "
                    "was started"
                )
            if not can_become(one.record, role):
                stages = ", ".join(one.record.stages) or one.record.role
                raise FleetUnchanged(f"{node_id} cannot become a {role} node: it can {stages}")
        left = 0
        for one in members:
            try:
                left += (await one.client.switch(role)).num_left
            except MoonpoolError as error:
                raise ProviderFailed(f"{node_id} did not become a {role} node: {error}") from error
        log.info("%s becomes a %s node: %s", node_id, role, why)
        self._on_change("switches", node_id, f"from {former} to {role}: {why}")
        return left

    async def lend(self, node_id: str, model: str, why: str, *, fence: int = 0) -> None:
        """Have a node of the provider serve another model; ``node_id``: of the node, ``fence``: as in
        ``start``. Raises as ``switch_model``.
        """
        if model == self.model:
            raise FleetUnchanged(f"{node_id} serves {model} already")
        if not isinstance(self.provider, SwitchingProvider):
            name = self.provider.name if self.provider else "none"
            raise FleetUnchanged(
                f"nodes of this cluster do not change their model (fleet.provider={name}): start one of "
                f"{model}, then drain {node_id}"
            )
        if node_id not in {node.node_id for node in await self.supplied()}:
            raise FleetUnchanged(f"{node_id} was started by others: start one of {model}, then drain it")
        await self.before_stop(node_id)
        role = self._members_of(node_id)[0].record.role
        await self.provider.switch(node_id, role, model, fence)
        log.info("%s leaves the model %s for %s: %s", node_id, self.model, model, why)
        self._on_change("switches", node_id, f"from the model {self.model} to {model}: {why}")

    async def supplied(self) -> Sequence[SuppliedNode]:
        """The provider's nodes, with the roles that they have now. Raises ``ProviderFailed``."""
        if self.provider is None:
            return ()
        roles = {one.owner: one.record.role for one in self._registry.members.values()}
        return [replace(one, role=roles.get(one.node_id, one.role)) for one in await self.provider.list()]

    def _members_of(self, node_id: str) -> list[Member]:
        """The replicas of a node. Raises ``NodeMissing``."""
        found = [one for one in self._registry.members.values() if node_id in (one.node_id, one.owner)]
        if not found:
            raise NodeMissing(f"there is no node {node_id[:128]!r}: see `moonpool fleet ls`")
        return found

    def _refuse_if_planned(self, role: str) -> None:
        if self._planned:
            bounds = (
                f"planner.{stage}_{end}" for stage in stages_of(role) or STAGES for end in ("least", "most")
            )
            raise FleetUnchanged(
                f"the planner decides how many {role} nodes there are (planner.mode=act): change "
                f"{', '.join(bounds)} or the mode"
            )

    async def _live(self, role: str) -> list[SuppliedNode]:
        return [node for node in await self.supplied() if node.role == role and node.counts]

    def removable(self, node_id: str) -> Removable:
        members = [one for one in self._registry.members.values() if one.owner == node_id]
        now_s = self._clock()
        return Removable(
            node_id,
            num_requests=sum(one.record.load.num_running + one.record.load.num_waiting for one in members),
            reused=sum(one.reuse.total(now_s) for one in members),
            serves=bool(members),
        )


async def _nothing(node_id: str) -> None:
    pass


def can_become(record: NodeRecord, role: str) -> bool:
    """Whether the node of this record can change to ``role`` in place."""
    stages = stages_of(role)
    return bool(stages) and not is_engine(record) and all(record.can(stage) for stage in stages)
