"""A model without a node: its first ones start when a request asks for it, and end when none did for long."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.conductor.fleet.administration import FleetAdmin
from moonpool.conductor.fleet.errors import ProviderFailed
from moonpool.conductor.fleet.providers.provider import SuppliedNode
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.observing import planner_metrics as metrics
from moonpool.conductor.planning.lease import PlannerLease
from moonpool.conductor.planning.observation import UNKNOWN_JOIN_S
from moonpool.conductor.planning.supply import UNREACHED_S, Supply
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.node_record import STAGES, stages_of
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

PERIOD_S = 1.0
# How long a request waits for a node to appear when none starts.
NODE_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Prospect:
    """Of a request without a node: how long to wait, why there is none, and when to come back."""

    wait_s: float
    why: str
    retry_after_s: float = 1.0


class OnDemand:
    """Of one model, with ``planner.min_warm`` 0; otherwise it says why there is no node, and changes nothing.

    ``asleep``: no request wants a node, and none is kept.
    """

    def __init__(
        self,
        registry: NodeRegistry,
        admin: FleetAdmin,
        lease: PlannerLease,
        *,
        roles: Sequence[str],
        min_warm: int,
        idle_s: float,
        activity: Callable[[], tuple[int, int]],
        clock: Callable[[], float],
    ) -> None:
        """``lease``: of the conductor that starts nodes. ``roles``: one node of each is started.
        ``activity``: requests placed so far by all conductors, and those in flight in this one."""
        self._registry = registry
        self._admin = admin
        self._lease = lease
        self._roles = roles
        self._idle_s = idle_s
        self._activity = activity
        self._clock = clock
        # Whether a request that finds no node has one started.
        self.starts_nodes = min_warm == 0 and admin.provider is not None
        self.asleep = self.starts_nodes
        self._supply = Supply()
        self._asked = asyncio.Event()
        self._is_wanted = False  # requests wait
        self._began_s: float | None = None  # when the nodes that are missing were asked for
        self._took_s = UNKNOWN_JOIN_S  # the last time
        self._starting: Sequence[str] = ()
        self._seen, self._busy_s = 0, clock()
        self._joined: set[str] = set()
        self._unreached_s: dict[str, float] = {}  # since when nodes are in the index and take no requests
        self._task: asyncio.Task[None] | None = None

    @property
    def decides(self) -> bool:
        """Whether the planner starts no node: none is wanted, or requests wait for the first ones. After
        these could not be started, the planner may start or borrow them."""
        return self.asleep or (self._is_wanted and not self._supply.held(self._clock()))

    def start(self) -> None:
        if self.starts_nodes:
            self._task = restarted(self._run, "nodes on demand")

    async def close(self) -> None:
        """Idempotent; nodes stay."""
        await cancel_and_wait(self._task)

    def ask(self) -> Prospect:
        """A request has no node to go to."""
        if self._admin.provider is None:
            return Prospect(NODE_WAIT_S, "this conductor has no provider that starts nodes (fleet.provider)")
        if not self.starts_nodes:
            return Prospect(NODE_WAIT_S, "no request starts a node (planner.min_warm is 1)")
        if self._serves():
            return Prospect(NODE_WAIT_S, "nodes serve, so that none is started")
        now_s = self._clock()
        if not self._is_wanted:
            self._asked.set()
        self._is_wanted, self.asleep = True, False
        if held := self._supply.held(now_s):
            return Prospect(NODE_WAIT_S, held, self._supply.held_until_s - now_s)
        left_s = max((now_s if self._began_s is None else self._began_s) + self._took_s - now_s, 1.0)
        names = ", ".join(self._starting) or "a node"
        return Prospect(math.inf, f"{names} starts, and may serve in {left_s:.0f} s", left_s)

    async def _run(self) -> None:
        while True:
            await self.round()
            try:
                await asyncio.wait_for(self._asked.wait(), PERIOD_S)
            except TimeoutError:
                continue
            self._asked.clear()

    async def round(self) -> None:
        """Look once, and start or end nodes."""
        now_s = self._clock()
        num_placed, num_running = self._activity()
        members = self._registry.members.values()
        loads = sum(one.record.load.num_running + one.record.load.num_waiting for one in members)
        joined = {one.owner for one in members}
        comes, self._joined = not joined <= self._joined, joined  # also from another model
        if num_placed != self._seen or num_running or loads or comes:
            self._seen, self._busy_s = num_placed, now_s
        serves = self._serves()
        if serves and self._began_s is not None:
            self._took_s = now_s - self._began_s
            metrics.woken_seconds.observe(self._took_s)
            self._began_s, self._starting = None, ()
        self._is_wanted &= num_running > 0 and not serves
        if not self._is_wanted:
            self._unreached_s = {}
        is_idle, slept = now_s - self._busy_s >= self._idle_s, self.asleep
        self.asleep = not self._is_wanted and (is_idle or not serves)
        try:
            if self._is_wanted:
                await self._start_missing(now_s)
            elif is_idle and (not slept or any(one.stages for one in members)):  # store nodes stay
                await self._end_idle()
        except ProviderFailed as error:
            log.warning("nodes on demand: %s", error)
            if self._is_wanted:
                self._supply.failed(str(error), self._clock())
                self._began_s = None
        except IndexUnavailable as error:
            log.warning("nodes on demand: none starts without Redis, which they join by: %s", error)

    def _serves(self) -> bool:
        return all(self._registry.available(stage) for stage in STAGES)

    async def _start_missing(self, now_s: float) -> None:
        # Before the nodes are listed: those that another conductor started under it are in the list then.
        # One that may start none does not keep it, so that another one tries.
        epoch = 0 if self._supply.held(now_s) else (await self._lease.take()).epoch
        supplied = await self._admin.supplied()
        members = self._registry.members.values()
        refused = {
            one.owner: why
            for one in members
            if one.stages and (why := self._registry.incompatible(one.record))
        }
        joined = {one.owner for one in members}
        expected, gives_up = self._supply.look(supplied, joined, self._took_s, now_s, refused)
        for node_id, why in gives_up.items():
            try:
                await self._admin.stop(node_id, why)
            except ProviderFailed as error:
                log.warning("%s was given up, and could not be stopped: %s", node_id, error)
                self._supply.still_runs(node_id, why, now_s)
        missing = [role for role in self._roles if not all(map(self._registry.available, stages_of(role)))]
        # Those in the index are waited for, too: a conductor needs a moment to reach them.
        arrived = {node.node_id for node in supplied if node.counts and node.role in missing} & joined
        arrived -= refused.keys()
        self._unreached_s = {name: self._unreached_s.get(name, now_s) for name in arrived}
        if late := [name for name, since_s in self._unreached_s.items() if now_s - since_s > UNREACHED_S]:
            names = ", ".join(sorted(late))
            self._supply.failed(f"{names}: in the index, but out of reach for {UNREACHED_S:g} s", now_s)
        self._starting = expected
        if self._supply.held(now_s):
            self._began_s = None
            return
        if self._began_s is None:
            self._began_s = now_s
        starting = {node.role for node in supplied if node.counts and node.node_id in {*expected, *arrived}}
        for role in missing:
            if role in starting:
                continue
            if not self._lease.holds(epoch):
                return  # another conductor starts them, or dies, and this one goes on
            node_id = await self._admin.start(role, "a request asked for a model without a node")
            self._starting = (*self._starting, node_id)

    async def _end_idle(self) -> None:
        live: list[SuppliedNode] = [node for node in await self._admin.supplied() if node.counts]
        for node in live:
            if self._activity() != (self._seen, 0):
                return  # a request has come meanwhile
            if node.can_stop and node.role != "store":
                why = f"nothing was asked of the model for {self._idle_s:g} s"
                await self._admin.stop(node.node_id, why)
