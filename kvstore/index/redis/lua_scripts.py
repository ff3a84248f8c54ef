"""The index's Lua scripts, one for each change that must happen in one step.

Records, batches and the data of events are sealed (``index.redis.seal``) before they come here.

The keys of a namespace share one hash tag, so that a script runs on one shard of a Redis Cluster, and every
key a script uses is declared. No FUNCTION: Redis 6.2 has none.

    {ns}:meta     hash   instance (random, made with the namespace), seq (last event), nbytes (of all events)
    {ns}:events   stream of changes; ids are seq-0 without holes, so that a reader sees a gap
    {ns}:marks    list   "seq:nbytes" every 64 events, to trim the stream by bytes
    {ns}:leases   sorted set   node id by the millisecond its lease ends, on Redis's clock
    {ns}:node:ID  hash   epoch, record, complete (sealed: all its blocks are published), base (log trimmed)
    {ns}:log:ID   list   its batches of changes (index.redis.changes), oldest first
"""

from __future__ import annotations

from hashlib import sha1

_PRELUDE = """
redis.replicate_commands()
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
-- Epochs are 64-bit and Lua's numbers are not: compare them as decimal text. Other text is older than any.
local function newer(a, b)
  return string.match(a, '^%d+$') and (#a > #b or (#a == #b and a > b))
end
-- The refusal of an epoch that is not current, or of a log that ends before `position`: its end only moves
-- on, so Redis has lost changes. Else nil, and the position of its end.
local function refusal(node, log, epoch, position)
  local found = redis.call('HMGET', node, 'epoch', 'base')
  if found[1] ~= epoch then
    if found[1] and newer(found[1], epoch) then return {'SUPERSEDED', found[1]} end
    return {'UNKNOWN'}
  end
  local stop = (tonumber(found[2] or '0') or 0) + redis.call('LLEN', log)
  if stop < tonumber(position) then return {'OLDER'} end
  return nil, stop
end
-- A namespace without an instance is new, or Redis has lost it: what is left of an old stream is of no use.
local function open(meta, events, marks, instance)
  if redis.call('HSETNX', meta, 'instance', instance) == 1 then
    redis.call('UNLINK', events, marks)
    redis.call('HDEL', meta, 'seq', 'nbytes')
  end
end
local function emit(events, meta, marks, budget, kind, node, epoch, data)
  local seq = redis.call('HINCRBY', meta, 'seq', 1)
  local id = string.format('%.0f', seq)
  redis.call('XADD', events, id .. '-0', 'k', kind, 'n', node, 'e', epoch, 'd', data)
  local total = redis.call('HINCRBY', meta, 'nbytes', #data + 64)
  if seq % 64 == 0 then
    redis.call('RPUSH', marks, id .. ':' .. string.format('%.0f', total))
    local upto = nil
    while true do
      local mark = redis.call('LINDEX', marks, 0)
      local at, nbytes = string.match(mark, '(%d+):(%d+)')
      if total - tonumber(nbytes) <= tonumber(budget) then break end
      upto = at
      redis.call('LPOP', marks)
    end
    if upto then redis.call('XTRIM', events, 'MINID', '~', upto .. '-0') end
  end
  return seq
end
"""


class Script:
    """Lua text with the functions above it, and its digest for EVALSHA."""

    __slots__ = ("sha", "text")

    def __init__(self, body: str) -> None:
        self.text = _PRELUDE + body
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


# KEYS node log leases events meta marks | ARGV id epoch record ttl_ms instance budget complete joined
# `joined` is the record as sealed for the event.
register = Script("""
-- What is no hash is no node's.
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then redis.call('UNLINK', KEYS[1]) end
if redis.call('TYPE', KEYS[2]).ok ~= 'list' then redis.call('UNLINK', KEYS[2]) end
local current = redis.call('HGET', KEYS[1], 'epoch')
if current and newer(current, ARGV[2]) then return {'SUPERSEDED', current} end
open(KEYS[5], KEYS[4], KEYS[6], ARGV[5])
-- The base only ever grows, so that a reader half way through the old log starts over, and a node notices a
-- Redis that went back to it. Also after a drop, which leaves none: milliseconds are more than batches.
local base = tonumber(redis.call('HGET', KEYS[1], 'base') or '') or now_ms()
base = base + redis.call('LLEN', KEYS[2]) + 1
redis.call('UNLINK', KEYS[2])
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'record', ARGV[3], 'complete', ARGV[7], 'base', base)
redis.call('ZADD', KEYS[3], now_ms() + tonumber(ARGV[4]), ARGV[1])
local seq = emit(KEYS[4], KEYS[5], KEYS[6], ARGV[6], 'J', ARGV[1], ARGV[2], ARGV[8])
if ARGV[7] ~= '' then seq = emit(KEYS[4], KEYS[5], KEYS[6], ARGV[6], 'C', ARGV[1], ARGV[2], ARGV[7]) end
return {'OK', seq, base}
""")

# KEYS node log leases events meta marks | ARGV id epoch record ttl_ms budget position
heartbeat = Script("""
local refused = refusal(KEYS[1], KEYS[2], ARGV[2], ARGV[6])
if refused then return refused end
redis.call('HSET', KEYS[1], 'record', ARGV[3])
redis.call('ZADD', KEYS[3], now_ms() + tonumber(ARGV[4]), ARGV[1])
return {'OK', emit(KEYS[4], KEYS[5], KEYS[6], ARGV[5], 'H', ARGV[1], ARGV[2], ARGV[3])}
""")

# KEYS node log events meta marks | ARGV id epoch changes quiet base trim budget complete position
# Batches are sealed for their position in the log: where it has grown by another one, nothing is changed.
# `changes` go to the log and the stream. `quiet` goes to the log alone: it repeats what is still true of the
# `trim` oldest batches, which are dropped in the same step if the log still starts at `base`.
publish = Script("""
local refused, position = refusal(KEYS[1], KEYS[2], ARGV[2], ARGV[9])
if refused then return refused end
if position ~= tonumber(ARGV[9]) then return {'MOVED', position} end
if ARGV[3] ~= '' then
  position = position + 1
  redis.call('RPUSH', KEYS[2], ARGV[3])
  emit(KEYS[3], KEYS[4], KEYS[5], ARGV[7], 'B', ARGV[1], ARGV[2], ARGV[3])
end
if tonumber(ARGV[6]) > 0 and redis.call('HGET', KEYS[1], 'base') == ARGV[5] then
  if ARGV[4] ~= '' then
    redis.call('RPUSH', KEYS[2], ARGV[4])
    position = position + 1
  end
  redis.call('LTRIM', KEYS[2], ARGV[6], -1)
  redis.call('HINCRBY', KEYS[1], 'base', ARGV[6])
end
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[1], 'complete', ARGV[8])
  emit(KEYS[3], KEYS[4], KEYS[5], ARGV[7], 'C', ARGV[1], ARGV[2], ARGV[8])
end
return {'OK', position}
""")

# KEYS node log leases events meta marks | ARGV id epoch reason only_lapsed budget
# A lease that has ended goes also where it is all that is left of a node.
drop = Script("""
local current = redis.call('HGET', KEYS[1], 'epoch')
local ends = redis.call('ZSCORE', KEYS[3], ARGV[1])
local has_lapsed = not ends or tonumber(ends) <= now_ms()
if not current and has_lapsed then redis.call('ZREM', KEYS[3], ARGV[1]) end
if not current or current ~= ARGV[2] then return {'UNKNOWN'} end
if ARGV[4] == '1' and not has_lapsed then return {'ALIVE'} end
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[1])
return {'OK', emit(KEYS[4], KEYS[5], KEYS[6], ARGV[5], 'L', ARGV[1], current, ARGV[3])}
""")

# KEYS meta leases events marks | ARGV instance
# Makes the namespace if there is none; returns the end of the stream and the nodes with an expired lease.
watch = Script("""
open(KEYS[1], KEYS[3], KEYS[4], ARGV[1])
local seq = tonumber(redis.call('HGET', KEYS[1], 'seq') or '0') or 0
return {redis.call('HGET', KEYS[1], 'instance'), seq, redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now_ms())}
""")

# KEYS node log meta | ARGV position count
# Batches from an absolute position of the log on, and where the stream stood then.
read = Script("""
local head = redis.pcall('HMGET', KEYS[1], 'epoch', 'record', 'complete', 'base')
if head.err then return {'CORRUPT', head.err} end
if not head[1] then return {} end
local base = tonumber(head[4])
if not base or not head[2] then return {'CORRUPT', 'its hash lacks base or record'} end
local first = math.max(tonumber(ARGV[1]) - base, 0)
local batches = {}
if tonumber(ARGV[2]) > 0 then
  batches = redis.pcall('LRANGE', KEYS[2], first, first + tonumber(ARGV[2]) - 1)
  if batches.err then return {'CORRUPT', batches.err} end
end
local seq = tonumber(redis.call('HGET', KEYS[3], 'seq') or '0') or 0
return {head[1], head[2], head[3] or '', head[4], batches, seq}
""")
