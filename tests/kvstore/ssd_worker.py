"""A process that works on a tier until it is killed: puts, evictions, removals and reads, in no order.

    python -m tests.kvstore.ssd_worker DIRECTORY

It reads a seed a line; a child forked for each works on the tier, and is killed by the reader of its
process id. The child prints a line once it has begun.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from tests.kvstore.nodes import chain
from tests.kvstore.ssd_blocks import evict, get, open_tier, put_chain


async def work(directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    tier = await open_tier(directory)
    print(os.getpid(), flush=True)

    async def one() -> None:
        while True:
            number = rng.randrange(12)
            keys = chain(rng.randrange(1, 24), number)
            what = rng.random()
            if what < 0.7:
                await put_chain(tier, keys)
            elif what < 0.8:
                await tier.remove(keys[-3:])
            elif what < 0.9:
                await evict(tier, rng.randrange(1, 8))
            else:
                await get(tier, keys)

    await asyncio.gather(*(one() for _ in range(3)))


def main(work: Callable[[Path, int], Coroutine[None, None, None]], directory: Path) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            asyncio.run(work(directory, int(line)))
        os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main(work, Path(sys.argv[1]))
