"""Verification of every block and chunk of a store node."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from moonpool.kvstore.store import TieredStore
from moonpool.protos import store_pb2

_PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Shelf:
    """One store of a node: "kv" or "objects"."""

    name: str
    store: TieredStore


async def verify(shelves: Sequence[Shelf]) -> AsyncIterator[store_pb2.VerifyProgress]:
    """Yield progress, at most ten messages a second, one message for each damaged block, and a final one.
    Damaged copies are dropped. Closing the iterator stops it."""
    num_done = num_blocks = num_damaged = 0
    said_s = time.monotonic()

    def progress(damaged: str = "") -> store_pb2.VerifyProgress:
        return store_pb2.VerifyProgress(
            num_done=num_done, num_blocks=num_blocks, num_damaged=num_damaged, damaged=damaged
        )

    for shelf in shelves:
        before_done, before_blocks = num_done, num_blocks
        async for done, total, bad in shelf.store.verify():
            num_done, num_blocks = before_done + done, before_blocks + total
            for key in bad:
                num_damaged += 1
                yield progress(f"{shelf.name} block {key.hex()}")
            if time.monotonic() >= said_s + _PROGRESS_INTERVAL_S:
                said_s = time.monotonic()
                yield progress()
    yield progress()
