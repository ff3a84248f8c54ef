"""The canaries of a cluster in Redis, so that all conductors follow them:

    {ns}:canaries    hash   name of a model -> its latest canary, sealed
    {ns}:canary:ID   hash   conductor id -> what it counted for this one and its share, sealed; kept 30 days
                            after a change

``ns`` is the namespace of the first model. What is sealed for another place is no entry here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

import orjson

from moonpool.conductor.canary.decision import LEAST_REQUESTS, Tally
from moonpool.conductor.observing.slo import Slo
from moonpool.kvstore.errors import EntryRefused
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.lua_scripts import Script
from moonpool.kvstore.index.redis.redis_calls import pairs
from moonpool.kvstore.index.redis.seal import Seals, key_of_cluster

log = logging.getLogger(__name__)

RUNNING, PROMOTED, ROLLED_BACK = "running", "promoted", "rolled back"
STABLE, CANDIDATE = "stable", "candidate"
SIDES: Final = (STABLE, CANDIDATE)
_KEEP_MS = 30 * 86_400_000
_KIND = b"c"
_T = TypeVar("_T")


def new_sides() -> dict[str, Tally]:
    return {side: Tally() for side in SIDES}


@dataclass(frozen=True, slots=True)
class FormerShare:
    """What a canary counted with a share that it had before."""

    share: float
    sides: Mapping[str, Tally]


@dataclass(frozen=True, slots=True)
class Canary:
    """One model tried beside another one, under its name. ``state``: running, promoted or rolled back.

    ``tenants``: only their requests take part; empty: those of all. ``share``: percent of the conversations
    that go to the candidate. ``auto``: the conductors conclude it. ``sides``: the counts when it ended.
    ``former``: the shares before this one; the counts are of the present one alone.
    """

    id: str
    name: str
    stable: str  # what the name meant before
    candidate: str
    share: float
    tenants: tuple[str, ...] = ()
    auto: bool = False
    least: int = LEAST_REQUESTS
    slo_ttft_s: float = 0.0  # of the name's model when it began; 0: none
    slo_tbt_s: float = 0.0
    state: str = RUNNING
    reason: str = ""
    began_unix_s: float = 0.0
    ended_unix_s: float = 0.0
    sides: Mapping[str, Tally] = field(default_factory=new_sides)
    former: tuple[FormerShare, ...] = ()

    @property
    def counts_id(self) -> str:
        """Of its counts: each share has its own."""
        return f"{self.id}.{len(self.former)}" if self.former else self.id

    @property
    def runs(self) -> bool:
        return self.state == RUNNING

    @property
    def meaning(self) -> str:
        """The model that answers under the name, apart from the candidate's share."""
        return self.candidate if self.state == PROMOTED else self.stable

    @property
    def slo(self) -> Slo:
        return Slo.of_limits(self.slo_ttft_s, self.slo_tbt_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Canary:
        former = (FormerShare(one["share"], _sides(one["sides"])) for one in facts.get("former", ()))
        known = {"tenants": tuple(facts["tenants"]), "sides": _sides(facts["sides"]), "former": tuple(former)}
        return cls(**facts | known)


class CanaryRecords:
    """All methods but ``known`` raise ``IndexUnavailable``: Redis does not answer."""

    def __init__(self, index: KVIndex) -> None:
        """Raises ``ConfigError``: this process has the key of one role only."""
        self._index = index
        self._key = f"{{{index.namespace}}}:canaries"
        self._seals = Seals(key_of_cluster("canaries"))
        self._read: dict[str, tuple[bytes, Canary | None]] = {}

    @property
    def known(self) -> dict[str, Canary]:
        """As of the last ``read``, by name."""
        return {name: canary for name, (_, canary) in self._read.items() if canary is not None}

    async def read(self) -> None:
        """Look at all of them. One that no process of this cluster has written is logged and skipped."""
        flat = await self._index.command("HGETALL", self._key)
        before, self._read = self._read, {}
        for field_, data in pairs(flat):
            name = field_.decode(errors="replace")
            seen = before.get(name)
            if seen is None or seen[0] != data:
                seen = data, self._opened(f"{self._key}:{name}", data, Canary.from_dict)
            self._read[name] = seen

    async def put(self, canary: Canary) -> bool:
        """Write it in the place of what the last ``read`` found. False: another one was written since."""
        data = self._seals.seal(_KIND, f"{self._key}:{canary.name}".encode(), orjson.dumps(canary.to_dict()))
        before = self._read[canary.name][0] if canary.name in self._read else b""
        if not await self._index.run("canary", _SWAP, [self._key], [canary.name, before, data]):
            return False
        self._read[canary.name] = data, canary
        return True

    async def count(
        self, counts_id: str, conductor_id: str, own: Mapping[str, Tally] | None
    ) -> dict[str, Tally]:
        """Write what this conductor has counted in all (None: nothing), and return the sums over all
        conductors."""
        key, data = self._counts(counts_id), b""
        if own is not None:
            place = f"{key}:{conductor_id}".encode()
            data = self._seals.seal(_KIND, place, orjson.dumps({side: asdict(own[side]) for side in SIDES}))
        flat = await self._index.run("canary", _COUNT, [key], [conductor_id, data, _KEEP_MS])
        total = new_sides()
        for name, found in pairs(flat):
            sides = self._opened(f"{key}:{name.decode(errors='replace')}", found, _sides)
            for side, tally in (sides or {}).items():
                total[side].add(tally)
        return total

    async def forget_counts(self, counts_id: str) -> None:
        await self._index.command("UNLINK", self._counts(counts_id))

    def _counts(self, counts_id: str) -> str:
        return f"{{{self._index.namespace}}}:canary:{counts_id}"

    def _opened(self, place: str, data: bytes, read: Callable[[dict[str, Any]], _T]) -> _T | None:
        try:
            return read(orjson.loads(self._seals.open(_KIND, place.encode(), data).body))
        except (EntryRefused, orjson.JSONDecodeError, KeyError, TypeError) as error:
            log.error("an entry of a canary was skipped: %s: %s", place, error)
            return None


def _sides(facts: dict[str, Any]) -> dict[str, Tally]:
    return {side: Tally(**facts[side]) for side in SIDES}


# KEYS canaries | ARGV name before after
_SWAP = Script(
    """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
)

# KEYS counts | ARGV conductor sealed keep_ms
_COUNT = Script(
    """
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return redis.call('HGETALL', KEYS[1])
"""
)
