"""A mirror in a process of its own that says when it saw each change: ``python -m bench.index_watcher URL
NS``."""

from __future__ import annotations

import asyncio
import sys
from time import perf_counter

from kvstore.index import Event, KVIndex
from kvstore.mirror import IndexMirror
from kvstore.redis_client import connect


class _Watching(IndexMirror):
    """Notes when each event has been applied, by the last key it names."""

    seen: list[tuple[bytes, float]]

    def _apply(self, event: Event) -> None:
        super()._apply(event)
        if event.kind == b"B":
            self.seen.append((event.data[-16:], perf_counter()))


async def _main(url: str, namespace: str) -> None:
    client = connect(url)
    mirror = _Watching(KVIndex(client, namespace))
    mirror.seen = []
    await mirror.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await mirror.caught_up()
    for key, at in mirror.seen:
        print(key.hex(), at)
    await mirror.close()
    await client.aclose()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main(*sys.argv[1:]))
