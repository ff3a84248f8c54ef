"""What the conductors of one namespace announce about themselves in Redis, and where they disagree.

    {ns}:conductors  sorted set  conductor id by the millisecond its lease ends, on Redis's clock
    {ns}:facts       hash        conductor id -> JSON, sealed (see ``kvstore.index.redis.seal``)

Each announcement renews the lease and removes the entries of conductors with an ended one. No request waits
for it: the others themselves tell their load (see ``peers``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from moonpool.kvstore.errors import EntryCorrupt, EntryRefused, IndexUnavailable
from moonpool.kvstore.index.metrics import skipped_entries
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.lua_scripts import Script
from moonpool.kvstore.index.redis.redis_calls import pairs
from moonpool.runtime.observing import audit
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

_PERIOD_S = 5.0
_LEASE_PERIODS = 3
# Facts that block keys depend on: where they differ, one conductor misses what another one's requests cached.
KEY_FACTS = {
    "tokenizer": "another tokenizer (tokenizer.json): the same prompt becomes other tokens",
    "chat_template": "another chat template: the same conversation becomes another prompt",
    "block_size": "another engine.block_size: the same prompt is cut into other blocks",
    "model": "another model: nothing is shared",
}


class OtherConductors:
    """``facts``: ours; set them before ``start``. ``others``: the latest announcements, by conductor id."""

    def __init__(
        self,
        index: KVIndex,
        conductor_id: str,
        meet: Callable[[Mapping[str, str]], None],
        *,
        lease_ttl_s: float,
    ) -> None:
        """``meet``: called with the address of each other conductor by its id, after each announcement."""
        self.facts: dict[str, Any] = {}
        self.others: Mapping[str, Mapping[str, Any]] = {}
        self._index = index
        self._conductor_id = conductor_id
        self._meet = meet
        self._period_s = min(_PERIOD_S, lease_ttl_s / _LEASE_PERIODS)
        self._keys = [f"{{{index.namespace}}}:{name}" for name in ("conductors", "facts")]
        self._task: asyncio.Task[None] | None = None
        self._newest: dict[str, int] = {}  # number of each conductor's latest announcement

    def start(self) -> None:
        self._task = restarted(self._run, "announcements")

    async def close(self) -> None:
        """Idempotent. Without Redis, our announcement ends with our lease."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_and_wait(task)
        try:
            await self._index.run("leave", _LEAVE, self._keys, [self._conductor_id])
        except IndexUnavailable as error:
            log.info("the announcement stays until the lease ends: %s", error)

    def differences(self) -> Iterator[str]:
        """A sentence for each fact of another conductor that differs from ours."""
        for name, theirs in sorted(self.others.items()):
            for fact, means in KEY_FACTS.items():
                if fact in theirs and theirs[fact] != self.facts.get(fact):
                    yield (
                        f"{name} at {theirs.get('url', 'an unknown address')} has {means}, so that what it "
                        f"caches is not found here ({theirs[fact]} there, {self.facts.get(fact)} here)"
                    )

    async def _run(self) -> None:
        logged: set[str] = set()
        while True:
            try:
                self.others = await self._announce()
                self._meet({name: str(facts.get("peer_address", "")) for name, facts in self.others.items()})
            except IndexUnavailable as error:
                log.debug("this conductor is not announced: %s", error)
            for sentence in set(self.differences()) - logged:
                log.warning("%s", sentence)
                logged.add(sentence)
            await asyncio.sleep(self._period_s)

    async def _announce(self) -> dict[str, dict[str, Any]]:
        """Renew our lease and replace our facts. Returns the facts of the others, by conductor id.

        Raises ``IndexUnavailable``.
        """
        lease_ms = round(_LEASE_PERIODS * self._period_s * 1000)
        number = self._newest[self._conductor_id] = max(
            self._newest.get(self._conductor_id, 0) + 1, self._index.now_ms() + lease_ms
        )
        sealed = self._index.seals.seal(
            b"F", self._place(self._conductor_id), orjson.dumps(self.facts), number=number
        )
        args: list[object] = [self._conductor_id, sealed, lease_ms]
        flat = await self._index.run("announce", _ANNOUNCE, self._keys, args)
        found = {name.decode(errors="replace"): data for name, data in pairs(flat)}
        found.pop(self._conductor_id, None)
        self._newest = {name: last for name, last in self._newest.items() if not self._index.expired(last)}
        return {name: facts for name, data in found.items() if (facts := self._facts(name, data)) is not None}

    def _facts(self, name: str, data: bytes) -> dict[str, Any] | None:
        """None: they cannot be used, which is logged and counted."""
        try:
            _, number, body = self._index.seals.open(b"F", self._place(name), data)
            if number < self._newest.get(name, 0):
                raise EntryRefused("replayed", "a newer one is known")
            if self._index.expired(number):
                raise EntryRefused("expired", "its conductor did not renew it, or clocks differ")
            self._newest[name] = number
            facts = orjson.loads(body)
            if not isinstance(facts, dict):
                raise EntryCorrupt(f"it is no object: {body[:64]!r}")
        except (EntryCorrupt, orjson.JSONDecodeError) as error:
            reason = getattr(error, "reason", "unreadable")
            skipped_entries.labels(reason).inc()
            log.error("the announcement of conductor %s was skipped: %s", name, error)
            if reason == "forged":
                audit.refused("Redis", f"the announcement of conductor {name}: {error}", kind="forged")
            return None
        return facts

    def _place(self, name: str) -> bytes:
        return f"{self._keys[1]}:{name}".encode()


# KEYS conductors facts | ARGV id json lease_ms
_ANNOUNCE = Script(
    """
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
for _, id in ipairs(redis.call('HKEYS', KEYS[2])) do
  if not redis.call('ZSCORE', KEYS[1], id) then redis.call('HDEL', KEYS[2], id) end
end
return redis.call('HGETALL', KEYS[2])
"""
)

# KEYS conductors facts | ARGV id
_LEAVE = Script(
    """
redis.call('HDEL', KEYS[2], ARGV[1])
return redis.call('ZREM', KEYS[1], ARGV[1])
"""
)
