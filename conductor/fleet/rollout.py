"""Replaces the nodes of a provider one by one by nodes with other settings, while they serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

from moonpool.conductor.errors import ConductorError
from moonpool.conductor.fleet.administration import FleetAdmin
from moonpool.conductor.fleet.errors import FleetUnchanged
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.providers.provider import VersionedProvider
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.observing.demand import Demand
from moonpool.kvstore.index.redis.node_record import ROLES

log = logging.getLogger(__name__)

SECTIONS: Final = ("engine", "log", "model", "store", "transfer")
"""Options that a rollout may change: of what a node does, not of who it is or whom it trusts."""
MOST_SETTINGS: Final = 32
JOIN_S: Final = 180.0
DRAIN_S: Final = 180.0
_LOOK_S = 0.1
_PROBES = 3
# A newcomer's caches are cold and its machine may be busy: only much slower than the node before it is wrong.
_SLOWER, _SLOWER_S = 3.0, 1.0


class _Stopped(Exception):
    """The rollout does not go on; the text says why."""


@dataclass(slots=True)
class Replacement:
    """``state``: starting, watched, draining, done, or removed (rolled back)."""

    old: str
    role: str
    new: str = ""
    state: str = "starting"
    probe_s: float = 0.0  # of the newcomer, a median; and of the node before it
    old_probe_s: float = 0.0


@dataclass(slots=True)
class RolloutStatus:
    """``state``: none, running, rolling back, done, rolled back or failed (some nodes are of either version).

    ``attained``: fractions of requests within the SLO since it began, None before there were any.
    """

    state: str = "none"
    settings: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    attained: dict[str, float | None] = field(default_factory=dict)
    moves: list[Replacement] = field(default_factory=list)


class Rollouts:
    """One rollout at a time, of this conductor. It ends with its conductor: nodes stay as they are then."""

    def __init__(
        self,
        fleet: FleetAdmin,
        registry: NodeRegistry,
        probe: Callable[[str, frozenset[str]], Awaitable[float]],
        demand: Callable[[], Demand],
        clock: Callable[[], float],
        on_event: Callable[[str, str, str], None],
    ) -> None:
        """``probe``: generates on a node, without the others given, and returns the seconds it took.

        It raises ``ConductorError``: it failed there, or ran elsewhere.
        """
        self._fleet = fleet
        self._registry = registry
        self._probe = probe
        self._demand = demand
        self._clock = clock
        self._on_event = on_event
        self._status = RolloutStatus()
        self._before = Demand()
        self._began_s = 0.0
        self._abort = ""
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop where it is. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def status(self) -> dict[str, Any]:
        """Plain JSON types."""
        if self._runs:
            self._measure()
        return asdict(self._status)

    def begin(self, settings: Sequence[str], watch_s: float) -> dict[str, Any]:
        """Begin to replace all nodes of the provider. ``settings``: ``section.key=value``; ``watch_s``: how
        long each newcomer is watched before the node before it drains.

        Raises ``FleetUnchanged``: there is no provider that can, another rollout runs, or a setting is not
        one of ``SECTIONS``.
        """
        provider = self._fleet.provider
        if not isinstance(provider, VersionedProvider):
            name = provider.name if provider is not None else "none"
            raise FleetUnchanged(
                f"the provider ({name}) starts no nodes with other settings: roll out where it "
                "takes them from"
            )
        if self._runs:
            raise FleetUnchanged("a rollout runs: see `moonpool fleet rollout --status`, or --abort it")
        if not 0 < len(settings) <= MOST_SETTINGS:
            raise FleetUnchanged(
                f"a rollout needs 1 to {MOST_SETTINGS} settings: --set SECTION.KEY=VALUE, or --model PATH"
            )
        for one in settings:
            if one.partition(".")[0] not in SECTIONS or "=" not in one:
                raise FleetUnchanged(
                    f"{one[:64]!r}: a rollout changes {', '.join(SECTIONS)}, as SECTION.KEY=VALUE"
                )
        self._status = RolloutStatus("running", tuple(settings))
        self._before, self._began_s, self._abort = self._demand(), self._clock(), ""
        self._task = asyncio.create_task(self._run(provider, watch_s), name="rollout")
        return self.status

    def abort(self) -> dict[str, Any]:
        """Roll back. Raises ``FleetUnchanged``: none runs."""
        if not self._runs:
            raise FleetUnchanged("no rollout of this conductor runs")
        self._abort = "an operator aborted it"
        return self.status

    @property
    def _runs(self) -> bool:
        return self._status.state in ("running", "rolling back")

    def _measure(self) -> None:
        now = self._demand().minus(self._before)
        self._status.seconds = self._clock() - self._began_s
        self._status.attained = {
            "ttft": now.num_ttft_within / now.num_first_tokens if now.num_first_tokens else None,
            "tbt": now.num_tbt_within / now.num_decoded if now.num_decoded else None,
        }

    async def _run(self, provider: VersionedProvider, watch_s: float) -> None:
        status = self._status
        try:
            await self._replace_all(provider, watch_s)
            await provider.settle(status.settings)
            self._end("done", "")
        except (_Stopped, ConductorError) as failure:
            log.warning("the rollout is rolled back: %s", failure)
            status.state, status.reason = "rolling back", str(failure)
            try:
                await self._roll_back()
                self._end("rolled back", status.reason)
            except (_Stopped, ConductorError) as error:
                self._end("failed", f"{status.reason}; and it was not rolled back: {error}")
        except Exception as error:  # a defect: it must be seen
            log.exception("the rollout has failed")
            self._end("failed", f"{type(error).__name__}: {error}")

    def _end(self, state: str, reason: str) -> None:
        self._measure()
        self._status.state, self._status.reason = state, reason
        self._on_event("rollout", ", ".join(self._status.settings), f"{state}: {reason}" if reason else state)

    # ------------------------------------------------------------------ steps

    async def _replace_all(self, provider: VersionedProvider, watch_s: float) -> None:
        """Until no node is of the former version: those that came meanwhile are."""
        status = self._status
        while True:
            renewed = {move.new for move in status.moves}
            left = [
                node
                for node in await self._fleet.supplied()
                if node.counts and node.role in ROLES and node.node_id not in renewed
            ]
            if not left:
                return
            move = Replacement(left[0].node_id, left[0].role)
            status.moves.append(move)
            why = f"it replaces {move.old}"
            move.new = await self._fleet.start_with(provider, move.role, status.settings, why)
            member = await self._joined(move.new)
            move.state = "watched"
            await self._watch(move, member, watch_s)
            move.state = "draining"
            await self._remove(move.old, f"{move.new} replaces it")
            move.state = "done"

    async def _roll_back(self) -> None:
        """Remove the newcomers; where the node before it has gone, after one like that has joined."""
        for move in reversed(self._status.moves):
            if move.state in ("draining", "done"):
                again = await self._fleet.start(move.role, "the rollout is rolled back")
                await self._joined(again, abortable=False)
            supplied = {node.node_id for node in await self._fleet.supplied() if node.counts}
            if move.new in supplied:
                await self._remove(move.new, "the rollout is rolled back", abortable=False)
            move.state = "removed"

    async def _remove(self, node_id: str, why: str, *, abortable: bool = True) -> None:
        """Drain a node: its requests move to others. Returns when it has ended."""
        await self._fleet.stop(node_id, why)
        until_s = self._clock() + DRAIN_S
        while node_id in {node.node_id for node in await self._fleet.supplied()}:
            await self._pause(until_s, f"{node_id} did not end within {DRAIN_S:g} s", abortable)

    async def _joined(self, node_id: str, *, abortable: bool = True) -> Member:
        """The node, once it takes requests. Raises ``_Stopped``."""
        until_s = self._clock() + JOIN_S
        while True:
            supplied = {node.node_id: node for node in await self._fleet.supplied()}
            if node_id not in supplied or not supplied[node_id].counts:
                reason = supplied[node_id].reason if node_id in supplied else "it has ended"
                raise _Stopped(f"{node_id} did not start: {reason or 'it ends'}")
            members = self._members(node_id)
            for member in members:
                if why := self._registry.incompatible(member.record):
                    raise _Stopped(f"{node_id} cannot serve beside the other nodes: {why}")
            if members and all(one.available(self._clock()) for one in members):
                return members[0]
            await self._pause(until_s, f"{node_id} did not join within {JOIN_S:g} s", abortable)

    async def _watch(self, move: Replacement, member: Member, watch_s: float) -> None:
        """The gate: it answers, about as fast as the node before it, and nothing is wrong with it for
        ``watch_s``. Raises ``_Stopped``."""
        epoch = member.record.epoch
        move.old_probe_s = await self._probed(move.old, move.role)
        move.probe_s = await self._probed(move.new, move.role)
        limit_s = _SLOWER * move.old_probe_s + _SLOWER_S
        if move.probe_s > limit_s:
            raise _Stopped(
                f"{move.new} is slow: a short request takes {move.probe_s:.2g} s there, and "
                f"{move.old_probe_s:.2g} s on {move.old}"
            )
        ends_s = self._clock() + watch_s
        while (now_s := self._clock()) < ends_s:
            found = self._registry.members.get(member.node_id)
            if found is None or found.record.epoch != epoch:
                raise _Stopped(f"{move.new} ended or began anew while it was watched")
            if not found.client.connected:
                raise _Stopped(f"{move.new} could not be reached while it was watched")
            if not found.healthy:
                raise _Stopped(f"{move.new} is unhealthy: {'; '.join(found.record.reasons)}")
            if not found.breaker.closed(now_s):
                raise _Stopped(f"{move.new} failed requests while it was watched")
            await self._pause(ends_s + 1, "", True)

    async def _probed(self, node_id: str, role: str) -> float:
        """The median seconds of short requests on a node, which may have to wait for their turn there."""
        others = frozenset(
            one.node_id
            for one in self._registry.members.values()
            if one.owner != node_id and one.record.role == role
        )
        seconds: list[float] = []
        until_s, failure = self._clock() + JOIN_S / 3, ""
        while len(seconds) < _PROBES:
            try:
                seconds.append(await self._probe(node_id, others))
                continue
            except ConductorError as error:
                failure = str(error)
            await self._pause(until_s, f"{node_id} answers no request: {failure}", True)
        return median(seconds)

    async def _pause(self, until_s: float, failure: str, abortable: bool) -> None:
        if self._abort and abortable:
            raise _Stopped(self._abort)
        if self._clock() > until_s:
            raise _Stopped(failure)
        await asyncio.sleep(_LOOK_S)

    def _members(self, node_id: str) -> list[Member]:
        return [one for one in self._registry.members.values() if one.owner == node_id]
