"""The leases of the planner and of the first nodes: one conductor of a namespace plans or wakes at a time.

    {ns}:planner, {ns}:first_nodes   hash   holder, epoch (grows with each holder), until (millisecond, on
                                            Redis's clock)

It keeps conductors that work together apart. The planner's epoch travels with each change, and providers
refuse one older than they have seen. Whoever can write to Redis can stop the planning, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.conductor.fleet.errors import PlannerOutdated, ProviderFailed
from moonpool.conductor.fleet.providers.provider import Provider
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.lua_scripts import Script


@dataclass(frozen=True, slots=True)
class Held:
    """Which conductor plans. ``epoch``: 0 where another does. ``until_s``: by our clock, when ours ends."""

    holder: str
    epoch: int = 0
    until_s: float = 0.0


class PlannerLease:
    """Taken and renewed by ``take``, given back by ``leave``."""

    def __init__(
        self,
        index: KVIndex,
        conductor_id: str,
        *,
        ttl_s: float,
        clock: Callable[[], float],
        name: str = "planner",
    ) -> None:
        self._index = index
        self._conductor_id = conductor_id
        self._ttl_s = ttl_s
        self._clock = clock
        self._key = f"{{{index.namespace}}}:{name}"
        self._held = Held("")
        self._latest = 0  # epoch that is known here, of whichever holder, or by a provider
        self._accepted: dict[Provider | None, int] = {}  # epoch of ours with which each has made a change

    async def take(self) -> Held:
        """Take the lease if it is free, or renew ours. Raises ``IndexUnavailable``."""
        # From before the request: Redis counts from when it arrives.
        until_s = self._clock() + self._ttl_s
        args: list[object] = [self._conductor_id, round(self._ttl_s * 1000), self._latest]
        holder, epoch = await self._index.run("plan", _TAKE, [self._key], args)
        self._latest = max(self._latest, int(epoch))
        name = holder.decode(errors="replace")
        ours = name == self._conductor_id
        self._held = Held(name, int(epoch), until_s) if ours else Held(name)
        return self._held

    def accepted(self, epoch: int, provider: Provider | None) -> None:
        """A provider made a change for our lease of this epoch."""
        self._accepted[provider] = epoch

    def refused(self, error: ProviderFailed, provider: Provider | None) -> None:
        """A provider made no change. If a later planner than ours has asked it, the next ``take`` gets an
        epoch after that one's: Redis and all conductors may have lost the former ones. Not where it accepted
        ours before: the later planner has another Redis, and runs."""
        if isinstance(error, PlannerOutdated) and self._held.epoch != self._accepted.get(provider):
            self._latest = max(self._latest, error.latest)

    def holds(self, epoch: int) -> bool:
        """Whether the lease of this epoch is ours for sure: not after a pause that outlasted it."""
        return self._held.epoch == epoch and self._clock() < self._held.until_s

    async def leave(self) -> None:
        """Let another conductor take it at once. Raises ``IndexUnavailable``: it ends by itself."""
        self._held = Held("")
        await self._index.run("stop planning", _LEAVE, [self._key], [self._conductor_id])


# KEYS lease | ARGV id lease_ms latest
_TAKE = Script(
    """
local now = now_ms()
local holder = redis.call('HGET', KEYS[1], 'holder')
local until_ms = tonumber(redis.call('HGET', KEYS[1], 'until') or '0')
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if until_ms > now and holder ~= ARGV[1] then return {holder, epoch} end
-- Ours may have lapsed and been another's since: a new epoch. Providers refuse one older than they have seen,
-- and Redis may have lost its data.
local latest = tonumber(ARGV[3])
if until_ms <= now or epoch < latest then epoch = math.max(epoch, latest) + 1 end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'until', now + ARGV[2], 'epoch', epoch)
return {ARGV[1], epoch}
"""
)

# KEYS lease | ARGV id
_LEAVE = Script(
    """
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then redis.call('HSET', KEYS[1], 'until', 0) end
return 1
"""
)
