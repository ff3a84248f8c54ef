"""A process that works on a whole store until it is killed: puts, evictions from pool, host memory and disk,
promotions, leases and removals, in no order.

    python -m tests.kvstore.store_worker DIRECTORY

As ``ssd_worker``: it reads a seed a line, and a child forked for each is what is to be killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import numpy as np

from moonpool.kvstore.errors import BlockMissing
from moonpool.kvstore.store import TieredStore
from moonpool.runtime.config.options import HostTierOptions, SsdTierOptions, StoreOptions
from tests.kvstore.fake_pool import FakePool
from tests.kvstore.nodes import chain
from tests.kvstore.ssd_blocks import LAYOUT, evict, open_tier, payload
from tests.kvstore.ssd_worker import main

POLICIES = ("write-back", "write-through", "selective")
NUM_SLOTS = 24


async def work(directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    options = StoreOptions(
        write_policy=POLICIES[seed % 3],
        host=HostTierOptions(watermark=0.7, policy=rng.choice(("lru", "prefix"))),
        ssd=SsdTierOptions(queue_nbytes=8 * LAYOUT.block_nbytes),
    )
    pool, disk = FakePool(), await open_tier(directory)
    memory = np.zeros(NUM_SLOTS * LAYOUT.block_nbytes, np.uint8)
    store = pool.store = TieredStore(LAYOUT, options, memory, pool=pool, ssd=disk)
    await store.start()
    print(os.getpid(), flush=True)

    async def one() -> None:
        while True:
            keys = chain(rng.randrange(1, 20), rng.randrange(10))
            await _do_something(store, pool, keys, rng)
            await asyncio.sleep(0)

    await asyncio.gather(*(one() for _ in range(3)))


async def _do_something(store: TieredStore, pool: FakePool, keys: list, rng: random.Random) -> None:
    what = rng.random()
    if what < 0.3:
        await store.put(keys, [payload(key) for key in keys])
    elif what < 0.5:
        for i, key in enumerate(keys[:6]):
            pool.seal(key, keys[i - 1] if i else None, payload(key))
    elif what < 0.6:
        while keys[0] in pool and pool.evict(keys[0]):
            pass
    elif what < 0.8:
        held = keys[: len(store.match(keys))]
        spans = [np.zeros(LAYOUT.block_nbytes, np.uint8) for _ in held]
        store.use(held)
        try:
            await store.get(held, spans)
        except BlockMissing as missing:
            del held[missing.first_missing :]
        for key, span in zip(held, spans, strict=False):
            assert np.array_equal(span, payload(key)), f"{key.hex()} has other bytes"
    elif what < 0.9:
        lease = await store.pin(keys, 1.0)
        await asyncio.sleep(0.001)
        store.release(lease.id)
    elif what < 0.95:
        await store.remove(keys[-2:])
    else:
        await evict(store.disk, rng.randrange(1, 6))


if __name__ == "__main__":
    main(work, Path(sys.argv[1]))
