"""Bookings: load that several conductors placed on the same nodes, counted atomically in Redis.

    {ns}:conductors  sorted set  conductor id by the millisecond its lease ends, on Redis's clock
    {ns}:booked      hash        "node|conductor" -> "blocks:microseconds of prefill"

Entries of a conductor count while its lease lasts. Each beat rewrites all of them, which removes the remains
of lost calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.conductor.placing.node_view import Load
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.lua_scripts import Script


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate node. ``capacity``: blocks of a decode node, 0: unlimited. ``ttft_s``: of a prefill node,
    without foreign load.
    """

    node: str  # node id and epoch
    capacity: int = 0
    ttft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Booking:
    """Positions of the booked nodes among the choices. ``had_room`` False: no decode node had room, the first
    was booked, and the request will wait there.
    """

    prefill: int
    decode: int  # -1: not needed
    had_room: bool


class Bookings:
    """The bookings of one conductor. Methods raise ``IndexUnavailable`` when Redis does not answer; the call
    may then have had its effect, which the next beat corrects.
    """

    def __init__(self, index: KVIndex, conductor_id: str, *, lease_ttl_s: float) -> None:
        self._index = index
        self._conductor_id = conductor_id
        self._lease_ms = max(1, round(lease_ttl_s * 1000))
        tag = f"{{{index.namespace}}}"
        self._keys = [f"{tag}:conductors", f"{tag}:booked"]

    async def beat(self, own: Mapping[str, Load]) -> tuple[int, dict[str, Load]]:
        """Renew the lease and replace all bookings of this conductor by ``own``.

        Returns the number of other conductors, and the sum of their bookings by node.
        """
        args: list[object] = [self._conductor_id, self._lease_ms]
        for node, load in own.items():
            args += [node, load.num_blocks, round(load.prefill_s * 1e6)]
        num_others, *flat = await self._index.run("beat", _BEAT, self._keys, args)
        loads = {
            flat[i].decode(): Load(int(flat[i + 1]), int(flat[i + 2]) / 1e6) for i in range(0, len(flat), 3)
        }
        return int(num_others), loads

    async def book(
        self, prefills: Sequence[Choice], decodes: Sequence[Choice], num_blocks: int, prefill_s: float
    ) -> Booking:
        """Book the prefill node that is earliest with its foreign load, and the first decode node with room
        for ``num_blocks``, atomically. ``decodes`` empty: none is needed.
        """
        args: list[object] = [self._conductor_id, num_blocks, round(prefill_s * 1e6), len(prefills)]
        for choice in prefills:
            args += [choice.node, round(choice.ttft_s * 1e6)]
        for choice in decodes:
            args += [choice.node, choice.capacity]
        prefill, decode, had_room = await self._index.run("book", _BOOK, self._keys, args)
        return Booking(int(prefill), int(decode), bool(had_room))

    async def leave(self) -> None:
        """Cancel all bookings and end the lease."""
        await self._index.run("leave", _LEAVE, self._keys, [self._conductor_id])


_PRELUDE = """
redis.replicate_commands()
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function parse(value)
  local blocks, us = string.match(value, '(-?%d+):(-?%d+)')
  return tonumber(blocks), tonumber(us)
end
local function write(field, blocks, us)
  if blocks > 0 or us > 0 then
    redis.call('HSET', KEYS[2], field, string.format('%.0f:%.0f', math.max(blocks, 0), math.max(us, 0)))
  else
    redis.call('HDEL', KEYS[2], field)
  end
end
-- Remove the bookings of one conductor, and those of conductors with an ended lease.
local function forget(me)
  local lapsed = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)
  local gone = {[me] = true}
  for _, id in ipairs(lapsed) do gone[id] = true end
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
  local fields = redis.call('HKEYS', KEYS[2])
  for _, field in ipairs(fields) do
    if gone[string.match(field, '|(.*)$')] then redis.call('HDEL', KEYS[2], field) end
  end
end
"""

# KEYS conductors booked | ARGV me lease_ms {node blocks us}…
_BEAT = Script(
    _PRELUDE
    + """
local me = ARGV[1]
forget(me)
redis.call('ZADD', KEYS[1], now + ARGV[2], me)
for i = 3, #ARGV, 3 do write(ARGV[i] .. '|' .. me, tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])) end
local sums, order = {}, {}
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local node, owner = string.match(all[i], '^(.*)|(.*)$')
  if owner ~= me then
    local blocks, us = parse(all[i + 1])
    if not sums[node] then sums[node] = {0, 0}; order[#order + 1] = node end
    sums[node][1] = sums[node][1] + blocks
    sums[node][2] = sums[node][2] + us
  end
end
local reply = {redis.call('ZCARD', KEYS[1]) - 1}
for _, node in ipairs(order) do
  reply[#reply + 1] = node
  reply[#reply + 1] = string.format('%.0f', sums[node][1])
  reply[#reply + 1] = string.format('%.0f', sums[node][2])
end
return reply
"""
)

# KEYS conductors booked | ARGV me blocks us num_prefills {node ttft_us}… {node capacity}…
_BOOK = Script(
    _PRELUDE
    + """
local me, need, us, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local live = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now), '+inf')
local function totals(node)
  local blocks, queue, mine = 0, 0, {0, 0}
  local fields = {}
  for _, id in ipairs(live) do fields[#fields + 1] = node .. '|' .. id end
  if #fields == 0 then return 0, 0, mine end
  for i, value in ipairs(redis.call('HMGET', KEYS[2], unpack(fields))) do
    if value then
      local b, q = parse(value)
      blocks = blocks + b
      if live[i] == me then mine = {b, q} else queue = queue + q end
    end
  end
  return blocks, queue, mine
end
local prefill, soonest, held = -1, nil, nil
for i = 0, count - 1 do
  local _, queue, mine = totals(ARGV[5 + 2 * i])
  local at = tonumber(ARGV[6 + 2 * i]) + queue
  if not soonest or at < soonest then prefill, soonest, held = i, at, mine end
end
if prefill >= 0 then write(ARGV[5 + 2 * prefill] .. '|' .. me, held[1], held[2] + us) end
local first = 5 + 2 * count
if #ARGV < first then return {prefill, -1, 1} end
local decode, room, kept = -1, 0, nil
for i = 0, (#ARGV - first + 1) / 2 - 1 do
  local blocks, _, mine = totals(ARGV[first + 2 * i])
  local capacity = tonumber(ARGV[first + 2 * i + 1])
  if i == 0 then kept = mine end
  if capacity == 0 or blocks + need <= capacity then decode, room, kept = i, 1, mine; break end
end
if decode < 0 then decode = 0 end
write(ARGV[first + 2 * decode] .. '|' .. me, kept[1] + need, kept[2])
return {prefill, decode, room}
"""
)

# KEYS conductors booked | ARGV me
_LEAVE = Script(
    _PRELUDE
    + """
forget(ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
return 1
"""
)
