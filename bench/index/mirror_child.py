"""A mirror in a process of its own that says when it saw each change: ``python -m
moonpool.bench.index.mirror_child URL
NS``."""

from __future__ import annotations

import asyncio
import sys
from time import perf_counter

from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex


async def _main(url: str, namespace: str) -> None:
    client = connect(url)
    mirror = IndexMirror(KVIndex(client, namespace))
    change = mirror._copy.change
    seen: list[tuple[bytes, float]] = []  # each batch, by the last key it names, and when it was applied

    def noting(node_id: str, changes: bytes) -> None:
        change(node_id, changes)
        seen.append((changes[-16:], perf_counter()))

    mirror._copy.change = noting  # type: ignore[method-assign]
    await mirror.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await mirror.caught_up()
    for key, at in seen:
        print(key.hex(), at)
    await mirror.close()
    await client.aclose()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main(*sys.argv[1:]))
