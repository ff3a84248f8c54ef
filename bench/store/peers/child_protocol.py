"""What every peer's child does: run by the peer's own python, it imports nothing of Moonpool but its like.

    python -m moonpool.bench.store.peers.lmcache_child DIRECTORY BLOCK_NBYTES NUM_BLOCKS BATCH THREADS

It prints ``{}`` when it is ready. Asked ``{"order": [block…]}``, it puts every block under a new name, gets
them all in that order, and answers ``{"put": seconds, "get": seconds}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


class Store(Protocol):
    def put(self, generation: int, blocks: Sequence[int]) -> None:
        """Returns when these are stored, as well as the peer stores anything."""

    def get(self, generation: int, blocks: Sequence[int]) -> None: ...

    def forget(self, generation: int) -> None:
        """Make room: what was put in this generation is asked for no more."""


def serve(make: Callable[[Path, int, int, int], Store]) -> None:
    """``make(directory, block_nbytes, num_blocks, threads)``"""
    directory = Path(sys.argv[1])
    block_nbytes, num_blocks, batch, threads = map(int, sys.argv[2:])
    # What its libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = make(directory, block_nbytes, num_blocks, threads)

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    answer({})
    for generation, line in enumerate(sys.stdin):
        order = json.loads(line)["order"]
        took = {}
        for name, call, blocks in (("put", store.put, range(num_blocks)), ("get", store.get, order)):
            started = time.perf_counter()
            for at in range(0, num_blocks, batch):
                call(generation, blocks[at : at + batch])
            took[name] = time.perf_counter() - started
        store.forget(generation)
        answer(took)
