"""What the conductors of one namespace tell each other of themselves.

    {ns}:facts  hash  conductor id -> JSON

Entries of conductors whose lease has ended (``moonpool.conductor.coordination.bookings``) are removed by
whoever tells next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.lua_scripts import Script


class Announcements:
    """One conductor's side. Methods raise ``IndexUnavailable`` when Redis does not answer."""

    def __init__(self, index: KVIndex, conductor_id: str) -> None:
        self._index = index
        self._conductor_id = conductor_id
        tag = f"{{{index.namespace}}}"
        self._keys = [f"{tag}:conductors", f"{tag}:facts"]

    async def tell(self, facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Replace what is known of this conductor; returns the facts of the others, by id."""
        args: list[object] = [self._conductor_id, orjson.dumps(facts)]
        flat = await self._index.run("tell", _TELL, self._keys, args)
        found = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
        found.pop(self._conductor_id, None)
        return {name: orjson.loads(told) for name, told in found.items()}


# KEYS conductors facts | ARGV id json
_TELL = Script(
    """
redis.replicate_commands()
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for _, id in ipairs(redis.call('HKEYS', KEYS[2])) do
  local ends = redis.call('ZSCORE', KEYS[1], id)
  if id ~= ARGV[1] and (not ends or tonumber(ends) < now) then redis.call('HDEL', KEYS[2], id) end
end
return redis.call('HGETALL', KEYS[2])
"""
)
