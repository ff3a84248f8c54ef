"""The rollout of a cluster, in Redis, so that another conductor goes on with it:

    {ns}:rollout   hash   epoch (grows with each conductor that runs it), until (millisecond, on Redis's
                          clock), runs (1 or 0), status (sealed), abort (1: an operator wants it rolled back)

A conductor that was superseded cannot write any more. The seal keeps others than conductors from making one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from moonpool.conductor.errors import ConductorError
from moonpool.kvstore.errors import EntryRefused
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.lua_scripts import Script
from moonpool.kvstore.index.redis.seal import Seals, key_of_cluster

RUNNING, ROLLING_BACK = "running", "rolling back"
_KIND = b"r"


class RolloutTaken(ConductorError):
    """Another conductor runs the rollout by now. Nothing was written."""

    code = "FAILED_PRECONDITION"


@dataclass(slots=True)
class Replacement:
    """``state``: starting, watched, draining, done; in a roll-back returning (one like ``old`` starts again),
    then removed. ``known``: nodes that were there before the latest one was started for it; ``again``: the
    node that came back in a roll-back."""

    old: str
    role: str
    known: tuple[str, ...] = ()
    new: str = ""
    again: str = ""
    state: str = "starting"
    probe_s: float = 0.0  # of the newcomer, a median; and of the node before it
    old_probe_s: float = 0.0


@dataclass(slots=True)
class RolloutStatus:
    """``state``: none, running, rolling back, done, rolled back or failed (some nodes are of either version).

    ``attained``: fractions of requests within the SLO since it began, None before there were any, of
    ``counts``: requests with a first token, those of them in time; requests that decoded, those in time.
    """

    state: str = "none"
    settings: tuple[str, ...] = ()
    watch_s: float = 0.0
    reason: str = ""
    began_unix_s: float = 0.0
    seconds: float = 0.0
    counts: tuple[int, ...] = (0, 0, 0, 0)
    attained: dict[str, float | None] = field(default_factory=dict)
    num_conductors: int = 1  # that ran it, one after the other
    moves: list[Replacement] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return self.state in (RUNNING, ROLLING_BACK)

    def closed(self, node_id: str) -> bool:
        """Whether a node must get no requests yet: its gate has not passed, or it may be one without a name
        so far."""
        if not self.runs:
            return False
        waiting = [move.new for move in self.moves if move.state in ("starting", "watched")]
        return node_id in waiting or "" in waiting

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> RolloutStatus:
        moves = [Replacement(**{**move, "known": tuple(move["known"])}) for move in facts["moves"]]
        lists = {name: tuple(facts[name]) for name in ("settings", "counts")}
        return cls(**facts | lists | {"moves": moves})


class RolloutRecord:
    """One for a cluster. All methods raise ``IndexUnavailable``: Redis does not answer."""

    def __init__(self, index: KVIndex, *, ttl_s: float) -> None:
        """``ttl_s``: how long a rollout waits for its conductor before another one may take it over."""
        self._index = index
        self._key = f"{{{index.namespace}}}:rollout"
        self._ttl_ms = round(ttl_s * 1000)
        self._seals = Seals(key_of_cluster("rollouts"))
        self._latest = 0  # epoch that is known here

    async def read(self) -> tuple[RolloutStatus, bool]:
        """The latest rollout, and whether an operator wants it rolled back."""
        data, abort, epoch = await self._index.command("HMGET", self._key, "status", "abort", "epoch")
        self._latest = max(self._latest, int(epoch or 0))
        if data is None:
            return RolloutStatus(), False
        try:
            body = self._seals.open(_KIND, self._key.encode(), data).body
        except EntryRefused:
            return RolloutStatus(state="failed", reason="its state in Redis is not of this cluster"), False
        return RolloutStatus.from_dict(orjson.loads(body)), abort == b"1"

    async def begin(self, status: RolloutStatus) -> int:
        """Return the epoch of a new rollout; 0: another one runs."""
        args = (self._ttl_ms, self._sealed(status), self._latest)
        return int(await self._run("begin", _BEGIN, *args))

    async def take_over(self) -> int:
        """Return the new epoch of a rollout that has lost its conductor; 0: there is none."""
        return int(await self._run("take over", _TAKE_OVER, self._ttl_ms))

    async def save(self, epoch: int, status: RolloutStatus, *, leaves: bool = False) -> bool:
        """Write the status, and keep others from taking over for ``ttl_s``; ``leaves``: let them at once.
        Return whether an operator wants it rolled back. Raises ``RolloutTaken``."""
        args = (epoch, 0 if leaves else self._ttl_ms, int(status.runs), self._sealed(status))
        current, abort = await self._run("save", _SAVE, *args)
        if int(current) != epoch:
            raise RolloutTaken(f"another conductor runs the rollout (epoch {int(current)}, ours was {epoch})")
        return bool(abort == b"1")

    async def abort(self) -> bool:
        """Have it rolled back. Returns whether one runs."""
        return bool(int(await self._run("abort", _ABORT)))

    async def _run(self, name: str, script: Script, *args: object) -> Any:
        return await self._index.run(f"{name} a rollout", script, [self._key], args)

    def _sealed(self, status: RolloutStatus) -> bytes:
        return self._seals.seal(_KIND, self._key.encode(), orjson.dumps(status.to_dict()))


# KEYS rollout | ARGV ttl_ms status latest
_BEGIN = Script(
    """
if redis.call('HGET', KEYS[1], 'runs') == '1' then return 0 end
-- Providers refuse an epoch older than they have seen, and Redis may have lost its data.
local epoch = math.max(tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0'), tonumber(ARGV[3])) + 1
redis.call('HSET', KEYS[1], 'runs', 1, 'until', now_ms() + ARGV[1], 'status', ARGV[2], 'epoch', epoch)
redis.call('HDEL', KEYS[1], 'abort')
return epoch
"""
)

# KEYS rollout | ARGV ttl_ms
_TAKE_OVER = Script(
    """
local until_ms = tonumber(redis.call('HGET', KEYS[1], 'until') or '0')
if redis.call('HGET', KEYS[1], 'runs') ~= '1' or until_ms > now_ms() then return 0 end
redis.call('HSET', KEYS[1], 'until', now_ms() + ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
"""
)

# KEYS rollout | ARGV epoch ttl_ms runs status
_SAVE = Script(
    """
local epoch = redis.call('HGET', KEYS[1], 'epoch') or '0'
if epoch == ARGV[1] then
  redis.call('HSET', KEYS[1], 'runs', ARGV[3], 'until', now_ms() + ARGV[2], 'status', ARGV[4])
end
return {tonumber(epoch), redis.call('HGET', KEYS[1], 'abort') or ''}
"""
)

# KEYS rollout
_ABORT = Script(
    """
if redis.call('HGET', KEYS[1], 'runs') ~= '1' then return 0 end
redis.call('HSET', KEYS[1], 'abort', 1)
return 1
"""
)
