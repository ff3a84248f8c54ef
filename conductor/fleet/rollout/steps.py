"""The steps of a rollout: each may be the first one of a conductor that took it over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from moonpool.conductor.errors import ConductorError
from moonpool.conductor.fleet.administration import FleetAdmin
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.providers.provider import FAILED, VersionedProvider
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.fleet.rollout.record import Replacement, RolloutStatus
from moonpool.kvstore.index.redis.node_record import ROLES

JOIN_S: Final = 180.0
DRAIN_S: Final = 180.0
_GATED = "node.gated=true"
_LOOK_S = 0.1
_PROBES = 3
# A newcomer's caches are cold and its machine may be busy: only much slower than the node before it is wrong.
_SLOWER, _SLOWER_S = 3.0, 1.0


class Stopped(Exception):
    """The rollout does not go on; the text says why."""


@dataclass(eq=False, slots=True)
class RolloutSteps:
    """Changes ``status``, and the fleet. Raises ``Stopped``, and what ``saved`` and the fleet raise.

    ``saved``: awaited after each change of ``status``, and before what must not be done twice.
    """

    status: RolloutStatus
    epoch: int
    fleet: FleetAdmin
    provider: VersionedProvider
    registry: NodeRegistry
    probe: Callable[[str], Awaitable[float]]
    clock: Callable[[], float]
    saved: Callable[[], Awaitable[None]]
    aborted: Callable[[], bool]

    async def replace_all(self) -> None:
        """Until no node is of the former version: those that came meanwhile are."""
        moves = self.status.moves
        while True:
            for move in moves:
                if move.state != "done":
                    await self._replace(move)
            supplied = {node.node_id: node for node in await self.fleet.supplied()}
            known = tuple(supplied)
            for move in moves:
                supplied.pop(move.new, None)
            left = [node for node in supplied.values() if node.counts and node.role in ROLES]
            if not left:
                break
            moves.append(Replacement(left[0].node_id, left[0].role, known))
            await self.saved()
        if self.aborted():
            raise Stopped("an operator aborted it")
        await self.provider.settle(self.status.settings)

    async def roll_back(self) -> None:
        """Remove the newcomers; where the node before it has gone, after one like that has joined."""
        why = "the rollout is rolled back"
        for move in reversed(self.status.moves):
            if move.state == "removed":
                continue
            # It may have been about to drain, and no more.
            if move.state in ("draining", "done") and not await self._counts(move.old):
                move.known = tuple(node.node_id for node in await self.fleet.supplied())
                move.state = "returning"
                await self.saved()
            if move.state == "returning":
                if not move.again:
                    move.again = await self._started(move, (), why)
                    await self.saved()
                await self._joined(move.again, is_open=True, abortable=False)
            # Its start may have failed for its caller alone.
            move.new = move.new or await self._unnamed(move)
            await self._remove(move.new, why, abortable=False)
            move.state = "removed"
            await self.saved()

    async def _replace(self, move: Replacement) -> None:
        if not move.new:
            settings = (*self.status.settings, _GATED)
            move.new = await self._started(move, settings, f"it replaces {move.old}")
            await self.saved()
        if move.state != "draining":
            members = await self._joined(move.new)
            move.state = "watched"
            await self._watch(move, members)
            move.state = "draining"
            await self.saved()
            await self._joined(move.new, is_open=True)
        await self._remove(move.old, f"{move.new} replaces it")
        move.state = "done"
        await self.saved()

    async def _started(self, move: Replacement, settings: Sequence[str], why: str) -> str:
        """Start a node, unless the conductor before this one did, and ended before it told."""
        if self.status.num_conductors > 1 and (node_id := await self._unnamed(move)):
            return node_id
        return await self.fleet.start(move.role, why, settings=settings, rollout=self.epoch)

    async def _unnamed(self, move: Replacement) -> str:
        """A node of its role that came since ``known``; empty: there is none."""
        for node in await self.fleet.supplied():
            if node.counts and node.role == move.role and node.node_id not in move.known:
                return node.node_id
        return ""

    async def _remove(self, node_id: str, why: str, *, abortable: bool = True) -> None:
        """Drain a node, if it is there: its requests move to others. Returns when it has ended."""
        if await self._counts(node_id):
            await self.fleet.stop(node_id, why, rollout=self.epoch)
        until_s = self.clock() + DRAIN_S
        while node_id in {node.node_id for node in await self.fleet.supplied() if node.state != FAILED}:
            await self._pause(until_s, f"{node_id} did not end within {DRAIN_S:g} s", abortable)

    async def _counts(self, node_id: str) -> bool:
        return node_id in {node.node_id for node in await self.fleet.supplied() if node.counts}

    async def _joined(self, node_id: str, *, is_open: bool = False, abortable: bool = True) -> list[Member]:
        """The node's replicas, once all can be reached; ``is_open``: once requests go there."""
        until_s = self.clock() + JOIN_S
        while True:
            supplied = {node.node_id: node for node in await self.fleet.supplied()}
            if node_id not in supplied or not supplied[node_id].counts:
                reason = supplied[node_id].reason if node_id in supplied else "it has ended"
                raise Stopped(f"{node_id} did not start: {reason or 'it ends'}")
            members = [one for one in self.registry.members.values() if one.owner == node_id]
            for member in members:
                if why := self.registry.incompatible(member.record):
                    raise Stopped(f"{node_id} cannot serve beside the other nodes: {why}")
            now_s = self.clock()
            replica = members[0].record.replica if members else None
            num_serving = sum((one.available if is_open else one.serves)(now_s) for one in members)
            if num_serving == (replica.count if replica else 1):
                return members
            await self._pause(until_s, f"{node_id} did not join within {JOIN_S:g} s", abortable)

    async def _watch(self, move: Replacement, members: Sequence[Member]) -> None:
        """The gate: it answers, about as fast as the node before it, and nothing is wrong with it for
        ``watch_s``."""
        epochs = {member.node_id: member.record.epoch for member in members}
        move.old_probe_s = await self._probed(move.old)
        move.probe_s = await self._probed(move.new)
        limit_s = _SLOWER * move.old_probe_s + _SLOWER_S
        if move.probe_s > limit_s:
            raise Stopped(
                f"{move.new} is slow: a short request takes {move.probe_s:.2g} s there, and "
                f"{move.old_probe_s:.2g} s on {move.old}"
            )
        ends_s = self.clock() + self.status.watch_s
        while (now_s := self.clock()) < ends_s:
            for node_id, epoch in epochs.items():
                found = self.registry.members.get(node_id)
                if found is None or found.record.epoch != epoch:
                    raise Stopped(f"{move.new} ended or began anew while it was watched")
                if not found.client.connected:
                    raise Stopped(f"{move.new} could not be reached while it was watched")
                if not found.healthy:
                    raise Stopped(f"{move.new} is unhealthy: {'; '.join(found.record.reasons)}")
                if not found.breaker.closed(now_s):
                    raise Stopped(f"{move.new} failed requests while it was watched")
            await self._pause(ends_s + 1, "")

    async def _probed(self, node_id: str) -> float:
        """The median seconds of short requests on a node, which may have to wait for their turn there."""
        seconds: list[float] = []
        until_s, failure = self.clock() + JOIN_S / 3, ""
        while len(seconds) < _PROBES:
            try:
                seconds.append(await self.probe(node_id))
                continue
            except ConductorError as error:
                failure = str(error)
            await self._pause(until_s, f"{node_id} answers no request: {failure}")
        return median(seconds)

    async def _pause(self, until_s: float, failure: str, abortable: bool = True) -> None:
        """Raises ``Stopped``: an operator aborted it, or it is ``until_s``, for the reason ``failure``."""
        if abortable and self.aborted():
            raise Stopped("an operator aborted it")
        if self.clock() > until_s:
            raise Stopped(failure)
        await asyncio.sleep(_LOOK_S)
