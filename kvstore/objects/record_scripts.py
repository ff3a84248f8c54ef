"""The Lua scripts that read and change records of objects, each in one step and on one key.

Records are spread over ``NUM_BUCKETS`` hashes, which a Redis Cluster spreads over its shards.

    NAMESPACE:objects:N   hash   owner + key of an object -> "version expires_ms storage payload";
                                 "generation" -> random text, made with the hash;
                                 "lost_ms" -> when a caller knew another generation, for the first time

Nodes seal the payload for its hash, field and storage (``index.redis.seal``); version and expiry are Redis's.

A hash without a generation is new, or Redis lost its data. A caller that knows another generation is told so,
and for a while after the first of them so is every other, also one that has known nothing; and nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.kvstore.index.redis.lua_scripts import Script
from moonpool.kvstore.objects.errors import ChangeUnknown, RecordsUnavailable

NUM_BUCKETS = 16

# ARGV 1: the generation that the caller knows, empty: none; 2: the name of a new one; 3: for how many ms
# after a loss the hash is not used, 0: for a call that restores it.
_PRELUDE = """
local known = redis.call('HGET', KEYS[1], 'generation')
if not known then
  known = ARGV[2]
  redis.call('HSET', KEYS[1], 'generation', known)
end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)
local function whole(number) return string.format('%.0f', number) end
local lost_ms = tonumber(redis.call('HGET', KEYS[1], 'lost_ms') or '')
local differs = ARGV[1] ~= '' and ARGV[1] ~= known
if differs and not lost_ms then
  lost_ms = now_ms
  redis.call('HSET', KEYS[1], 'lost_ms', whole(lost_ms))
end
local left_ms = lost_ms and math.max(lost_ms + tonumber(ARGV[3]) - now_ms, 0) or 0
if differs or (left_ms > 0 and tonumber(ARGV[3]) > 0) then return {'LOST', known, whole(left_ms)} end
local function header(value)
  local version, expires, storage = string.match(value, '^(%d+) (%d+) (%x+) ')
  -- A value that cannot be read is older than any: a put replaces it.
  return tonumber(version or 0), tonumber(expires or 0), storage or ''
end
local function value_of(version, expires, storage, payload)
  return whole(version) .. ' ' .. whole(expires) .. ' ' .. storage .. ' ' .. payload
end
local reply = {'OK', known, whole(now_ms)}
"""


class RecordScript(Script):
    """``failure``: the error if Redis does not answer, from its reason."""

    def __init__(self, name: str, body: str, failure: Callable[[str], Exception] = ChangeUnknown) -> None:
        super().__init__(_PRELUDE + body)
        self.name = name
        self.failure = failure


# ARGV field…   Replies with each value; empty: there is none. An expired one is deleted.
read = RecordScript(
    "read",
    """
for i = 4, #ARGV do
  local value = redis.call('HGET', KEYS[1], ARGV[i])
  if value then
    local _, expires = header(value)
    if expires > 0 and expires <= now_ms then
      redis.call('HDEL', KEYS[1], ARGV[i])
      value = nil
    end
  end
  reply[#reply + 1] = value or ''
end
return reply
""",
    RecordsUnavailable,
)

# ARGV (field storage ttl_ms payload)…   Replies with the new value and the former one of each. A repetition
# changes nothing.
put = RecordScript(
    "put",
    """
for i = 4, #ARGV, 4 do
  local field, storage, ttl_ms = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local former = redis.call('HGET', KEYS[1], field)
  local version, same = now_us, false
  if former then
    local was, _, stored = header(former)
    version = math.max(was + 1, now_us)
    same = stored == storage
  end
  local value = former
  if not same then
    value = value_of(version, ttl_ms > 0 and now_ms + ttl_ms or 0, storage, ARGV[i + 3])
    redis.call('HSET', KEYS[1], field, value)
  end
  reply[#reply + 1] = value
  reply[#reply + 1] = not same and former or ''
end
return reply
""",
)

# ARGV (field storage)…   Deletes those that name this storage. Replies with each deleted value, and with the
# storage that one that is left names.
remove = RecordScript(
    "remove",
    """
for i = 4, #ARGV, 2 do
  local value = redis.call('HGET', KEYS[1], ARGV[i])
  local gone, left = '', ''
  if value then
    local _, expires, storage = header(value)
    if storage == ARGV[i + 1] then
      redis.call('HDEL', KEYS[1], ARGV[i])
      gone = value
    elseif expires == 0 or expires > now_ms then
      left = storage
    end
  end
  reply[#reply + 1] = gone
  reply[#reply + 1] = left
end
return reply
""",
)

# ARGV field value payload   Replaces the payload of exactly this value; an empty one deletes it. Replies 1:
# done.
swap = RecordScript(
    "swap",
    """
local value = redis.call('HGET', KEYS[1], ARGV[4])
if value ~= ARGV[5] then
  reply[4] = 0
  return reply
end
if ARGV[6] == '' then
  redis.call('HDEL', KEYS[1], ARGV[4])
else
  local version, expires, storage = header(value)
  redis.call('HSET', KEYS[1], ARGV[4], value_of(version, expires, storage, ARGV[6]))
end
reply[4] = 1
return reply
""",
)

# ARGV field version expires_ms storage payload   After Redis lost its data: sets the record unless there is
# one of this version or a later one. Replies with the value then there.
restore = RecordScript(
    "restore",
    """
local value = redis.call('HGET', KEYS[1], ARGV[4])
if not value or header(value) < tonumber(ARGV[5]) then
  value = value_of(tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], ARGV[8])
  redis.call('HSET', KEYS[1], ARGV[4], value)
end
reply[4] = value
return reply
""",
)
