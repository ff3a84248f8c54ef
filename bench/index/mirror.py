"""A mirror of the index in a child process, which notes when it applied each change."""

from __future__ import annotations

from time import perf_counter

import uvloop

from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex

new_event_loop = uvloop.new_event_loop


class Mirror:
    def __init__(self, redis_url: str, namespace: str) -> None:
        self._mirror = IndexMirror(KVIndex(connect(redis_url), namespace))
        self._seen: dict[str, float] = {}
        self._change = self._mirror._copy.change

    async def start(self) -> None:
        self._mirror._copy.change = self._apply  # type: ignore[method-assign]
        await self._mirror.start()

    def _apply(self, node_id: str, changes: bytes) -> None:
        self._change(node_id, changes)
        self._seen[changes[-16:].hex()] = perf_counter()

    async def seen(self) -> dict[str, float]:
        """The last key of each change that was applied, and when, in seconds of ``perf_counter``."""
        await self._mirror.caught_up()
        return self._seen
