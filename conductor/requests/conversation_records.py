"""The messages behind responses, in Redis, so that any conductor goes on from a response of another one:

    {ns}:responses:TENANT        hash        response id -> its messages, encrypted under a key of the cluster
    {ns}:responses:TENANT:order  sorted set  "size:response id" by the millisecond it was written

``TENANT`` is a keyed digest of the tenant's name. The oldest conversations of a tenant go first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.lua_scripts import Script
from moonpool.kvstore.index.redis.seal import key_of_cluster

log = logging.getLogger(__name__)

KEEP_S: Final = 3600.0
"""How long a conversation is kept after its latest response."""
MAX_KEPT: Final = 1024
MAX_NBYTES: Final = 32 << 20
"""Of a tenant's conversations, as they are in Redis."""
MAX_CONVERSATION_NBYTES: Final = 1 << 20
"""Of one conversation before compression; a longer one stays at its conductor."""
_NONCE_NBYTES = 12
_COMPRESSION = 1

Messages = list[dict[str, Any]]


class ConversationRecords:
    """Conversations that any conductor of the cluster may continue. Safe for concurrent calls."""

    def __init__(self, index: KVIndex) -> None:
        """Raises ``ConfigError``: this process has the key of one role only."""
        self._index = index
        key = key_of_cluster("conversations to continue")
        self._cipher = AESGCM(key)
        self._tenants: Callable[[bytes], Any] = lambda name: blake2b(name, key=key, digest_size=16)

    async def put(self, tenant: str, response_id: str, messages: Messages) -> bool:
        """Keep the messages for ``KEEP_S``. False: they are too long, and nothing has changed.

        Raises ``IndexUnavailable``: perhaps they are kept.
        """
        written = orjson.dumps(messages)
        if len(written) > MAX_CONVERSATION_NBYTES:
            return False
        place = self._place(tenant)
        body = orjson.dumps({"until_ms": self._index.now_ms() + round(KEEP_S * 1000)}) + b"\n" + written
        # A long one takes a few hundredths of a second.
        sealed = await asyncio.to_thread(self._seal, body, self._about(place, response_id))
        args: list[object] = [response_id, sealed, round(KEEP_S * 1000), MAX_KEPT, MAX_NBYTES]
        await self._index.run("responses", _PUT, [place, f"{place}:order"], args)
        return True

    async def get(self, tenant: str, response_id: str) -> Messages | None:
        """The messages, with those of the response; None: it is unknown, too old, or another tenant's.

        Raises ``IndexUnavailable``.
        """
        place = self._place(tenant)
        data = await self._index.command("HGET", place, response_id)
        if data is None:
            return None
        try:
            body = await asyncio.to_thread(self._open, data, self._about(place, response_id))
        except (InvalidTag, ValueError):
            # Of another key, or written by something else.
            log.error("a conversation in Redis cannot be read: %s in %s", response_id[:64], place)
            return None
        head, _, written = body.partition(b"\n")
        if orjson.loads(head)["until_ms"] < self._index.now_ms():
            return None
        messages: Messages = orjson.loads(written)
        return messages

    def _seal(self, body: bytes, about: bytes) -> bytes:
        nonce = os.urandom(_NONCE_NBYTES)
        return nonce + self._cipher.encrypt(nonce, zlib.compress(body, _COMPRESSION), about)

    def _open(self, data: bytes, about: bytes) -> bytes:
        return zlib.decompress(self._cipher.decrypt(data[:_NONCE_NBYTES], data[_NONCE_NBYTES:], about))

    def _place(self, tenant: str) -> str:
        return f"{{{self._index.namespace}}}:responses:{self._tenants(tenant.encode()).hexdigest()}"

    @staticmethod
    def _about(place: str, response_id: str) -> bytes:
        """What an entry was written for: it is none for another tenant or response."""
        return f"{place}:{response_id}".encode()


# KEYS conversations order | ARGV id data ttl_ms max_kept max_nbytes
_PUT = Script(
    """
local now = now_ms()
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, #ARGV[2] .. ':' .. ARGV[1])
local kept, nbytes = 0, 0
local entries = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = #entries - 1, 1, -2 do
  local size, id = string.match(entries[i], '^(%d+):(.*)$')
  kept, nbytes = kept + 1, nbytes + tonumber(size)
  local old = tonumber(entries[i + 1]) < now - ARGV[3]
  if old or kept > tonumber(ARGV[4]) or nbytes > tonumber(ARGV[5]) then
    redis.call('ZREM', KEYS[2], entries[i])
    redis.call('HDEL', KEYS[1], id)
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return kept
"""
)
