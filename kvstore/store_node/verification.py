"""Verification of every block and chunk of a store node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from moonpool.kvstore.blocks.keys import BlockKey
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
    progress: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()
    num_damaged = before_done = before_total = 0
    for shelf in shelves:
        checking = asyncio.ensure_future(_check(shelf, progress))
        done = total = 0
        said_s = time.monotonic()
        try:
            while (step := await progress.get()) is not None:
                done, total = step
                if time.monotonic() >= said_s + _PROGRESS_INTERVAL_S:
                    said_s = time.monotonic()
                    yield store_pb2.VerifyProgress(
                        num_done=before_done + done, num_blocks=before_total + total, num_damaged=num_damaged
                    )
            damaged = await checking
        finally:
            checking.cancel()
        before_done, before_total = before_done + done, before_total + total
        for key in damaged:
            num_damaged += 1
            yield store_pb2.VerifyProgress(
                num_done=before_done,
                num_blocks=before_total,
                num_damaged=num_damaged,
                damaged=f"{shelf.name} block {key.hex()}",
            )
    yield store_pb2.VerifyProgress(num_done=before_done, num_blocks=before_total, num_damaged=num_damaged)


async def _check(shelf: Shelf, progress: asyncio.Queue[tuple[int, int] | None]) -> list[BlockKey]:
    try:
        return await shelf.store.verify(lambda done, total: progress.put_nowait((done, total)))
    finally:
        progress.put_nowait(None)
