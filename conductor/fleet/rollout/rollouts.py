"""Replaces the nodes of a provider one by one by nodes with other settings, while they serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from moonpool.conductor.errors import ConductorError
from moonpool.conductor.fleet.administration import FleetAdmin
from moonpool.conductor.fleet.errors import FleetUnchanged
from moonpool.conductor.fleet.providers.provider import VersionedProvider
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.fleet.rollout.record import (
    ROLLING_BACK,
    RUNNING,
    RolloutRecord,
    RolloutStatus,
    RolloutTaken,
)
from moonpool.conductor.fleet.rollout.steps import RolloutSteps, Stopped
from moonpool.conductor.observing.demand import Demand
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

SECTIONS: Final = ("engine", "log", "model", "store", "transfer")
"""Options that a rollout may change: what a node does, not its identity or which callers it trusts."""
MOST_SETTINGS: Final = 32
# How often the record is read, and renewed by the conductor that runs the rollout.
_POLL_S = 0.5


class Rollouts:
    """One rollout at a time in a cluster. Where its conductor ends, another one goes on with it.

    Every conductor keeps requests from nodes that have not passed their gate.
    """

    def __init__(
        self,
        fleet: FleetAdmin,
        registry: NodeRegistry,
        record: RolloutRecord,
        probe: Callable[[str], Awaitable[float]],
        demand: Callable[[], Demand],
        clock: Callable[[], float],
        on_event: Callable[[str, str, str], None],
    ) -> None:
        """``probe``: generates on a node, also on one that gets no requests yet, and returns the seconds it
        took. It raises ``ConductorError``: it failed there, or ran elsewhere. ``demand``: of all conductors.
        """
        self._fleet = fleet
        self._registry = registry
        self._record = record
        self._probe = probe
        self._demand = demand
        self._clock = clock
        self._on_event = on_event
        self._status = RolloutStatus()
        self._epoch = 0  # of the rollout that runs here
        self._before, self._counts = Demand(), self._status.counts  # when it came here
        self._abort = False
        self._task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watcher = restarted(self._follow, "rollouts")

    async def close(self) -> None:
        """Leave a rollout to another conductor. Idempotent."""
        tasks, self._watcher, self._task = (self._watcher, self._task), None, None
        await cancel_and_wait(*tasks)
        if self._epoch and self._status.runs:
            self._measure()
            try:
                await self._record.save(self._epoch, self._status, leaves=True)
            except (IndexUnavailable, RolloutTaken) as error:
                log.info("the rollout is left as it is: %s", error)

    async def status(self) -> dict[str, Any]:
        """The latest rollout of the cluster: plain JSON types. Raises ``IndexUnavailable``."""
        return (await self._record.read())[0].to_dict()

    async def begin(self, settings: Sequence[str], watch_s: float) -> dict[str, Any]:
        """Begin to replace all nodes of the provider. ``settings``: ``section.key=value``; ``watch_s``: how
        long each newcomer is watched before the node before it drains.

        Raises:
            FleetUnchanged: there is no provider that can, another rollout runs, or a setting is not one of
                ``SECTIONS``.
            IndexUnavailable: Redis does not answer.
        """
        provider = self._fleet.provider
        if not isinstance(provider, VersionedProvider):
            name = provider.name if provider is not None else "none"
            raise FleetUnchanged(
                f"the provider ({name}) starts no nodes with other settings: roll out where it "
                "takes them from"
            )
        if not 0 < len(settings) <= MOST_SETTINGS:
            raise FleetUnchanged(
                f"a rollout needs 1 to {MOST_SETTINGS} settings: --set SECTION.KEY=VALUE, or --model PATH"
            )
        for one in settings:
            if one.partition(".")[0] not in SECTIONS or "=" not in one:
                raise FleetUnchanged(
                    f"{one[:64]!r}: a rollout changes {', '.join(SECTIONS)}, as SECTION.KEY=VALUE"
                )
        status = RolloutStatus(RUNNING, tuple(settings), watch_s, began_unix_s=time.time())
        if not (epoch := await self._record.begin(status)):
            raise FleetUnchanged("a rollout runs: see `moonpool fleet rollout --status`, or --abort it")
        self._run_here(provider, status, epoch)
        return status.to_dict()

    async def abort(self) -> dict[str, Any]:
        """Roll back. Raises ``FleetUnchanged``: none runs; and ``IndexUnavailable``."""
        if not await self._record.abort():
            raise FleetUnchanged("no rollout runs")
        return await self.status()

    # ------------------------------------------------------------------ which conductor runs it

    def _run_here(self, provider: VersionedProvider, status: RolloutStatus, epoch: int) -> None:
        self._status, self._epoch, self._abort = status, epoch, False
        self._before, self._counts = self._demand(), status.counts
        self._task = asyncio.create_task(self._run(provider), name="rollout")

    async def _follow(self) -> None:
        while True:
            try:
                await self._look()
            except IndexUnavailable as error:
                # Newcomers wait, and so does a rollout.
                log.debug("rollouts are not known now: %s", error)
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> None:
        """Open what may be open, renew the rollout that runs here, or take one over."""
        status, _ = await self._record.read()
        for member in self._registry.members.values():
            if member.gated and not status.closed(member.owner):
                self._registry.open(member)
        if self._task is not None and not self._task.done():
            try:
                await self._save()
            except RolloutTaken as error:
                log.warning("%s", error)
                self._task.cancel()
        elif (
            status.runs
            and isinstance(provider := self._fleet.provider, VersionedProvider)
            and (epoch := await self._record.take_over())
        ):
            log.warning("this conductor goes on with the rollout of one that is gone")
            status, _ = await self._record.read()
            status.num_conductors += 1
            self._run_here(provider, status, epoch)

    async def _save(self) -> None:
        """Raises ``RolloutTaken``."""
        self._measure()
        self._abort = await self._record.save(self._epoch, self._status)

    async def _saved(self) -> None:
        """Write what has changed, before anything else is done. Waits for Redis. Raises ``RolloutTaken``."""
        while True:
            try:
                return await self._save()
            except IndexUnavailable:
                await asyncio.sleep(_POLL_S)

    def _measure(self) -> None:
        new, status = self._demand().minus(self._before), self._status
        counts = (new.num_first_tokens, new.num_ttft_within, new.num_decoded, new.num_tbt_within)
        status.counts = tuple(map(sum, zip(self._counts, counts, strict=True)))
        first, first_within, decoded, decoded_within = status.counts
        status.seconds = time.time() - status.began_unix_s
        status.attained = {
            "ttft": first_within / first if first else None,
            "tbt": decoded_within / decoded if decoded else None,
        }

    async def _run(self, provider: VersionedProvider) -> None:
        status = self._status
        steps = RolloutSteps(
            status,
            self._epoch,
            self._fleet,
            provider,
            self._registry,
            self._probe,
            self._clock,
            self._saved,
            lambda: self._abort,
        )
        try:
            if status.state == RUNNING:
                try:
                    await steps.replace_all()
                    return await self._end("done", "")
                except (Stopped, ConductorError) as failure:
                    if isinstance(failure, RolloutTaken):
                        raise
                    log.warning("the rollout is rolled back: %s", failure)
                    status.state, status.reason = ROLLING_BACK, str(failure)
                    await self._saved()
            await steps.roll_back()
            await self._end("rolled back", status.reason)
        except RolloutTaken as error:
            log.warning("%s", error)
        except (Stopped, ConductorError) as error:
            await self._end("failed", f"{status.reason}; and it was not rolled back: {error}")
        except Exception as error:  # a defect: it must be seen
            log.exception("the rollout has failed")
            await self._end("failed", f"{type(error).__name__}: {error}")

    async def _end(self, state: str, reason: str) -> None:
        self._status.state, self._status.reason = state, reason
        try:
            await self._saved()
        except RolloutTaken as error:
            log.warning("%s", error)
            return
        self._on_event("rollout", ", ".join(self._status.settings), f"{state}: {reason}" if reason else state)
