"""What a keeper of records does in the background."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from moonpool.kvstore.store_node.record_keeper import RecordKeeper


async def test_work_that_comes_just_as_the_last_ends_is_done() -> None:
    nothing: Any = None
    shelf: Any = SimpleNamespace(inventory=SimpleNamespace())
    keeper, done = RecordKeeper("a", shelf, nothing, nothing), asyncio.Event()

    async def second() -> None:
        done.set()

    async def first() -> None:
        # Runs when the task has ended, before those that wait for it are told.
        asyncio.get_running_loop().call_soon(keeper._start, "lost", second)

    keeper._start("lost", first)
    async with asyncio.timeout(10):
        await done.wait()
    await keeper.close()
