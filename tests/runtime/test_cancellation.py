"""Work that goes on after its caller was cancelled, and is waited for."""

from __future__ import annotations

import asyncio
import gc

import pytest

from moonpool.runtime.cancellation import outlast


async def test_a_caller_that_is_cancelled_again_and_again_waits_for_its_work() -> None:
    work, asked = asyncio.get_running_loop().create_future(), []
    waiting = asyncio.create_task(outlast(work, lambda: asked.append("to end")))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    done, _ = await asyncio.wait((waiting,), timeout=0.05)
    assert not done and not work.done() and asked == ["to end"]
    work.set_exception(ValueError("too late to be told"))
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_an_error_that_a_cancelled_caller_is_not_told_is_not_logged_either() -> None:
    loop, logged = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: logged.append(context))
    work = loop.create_future()
    waiting = asyncio.create_task(outlast(work))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    work.set_exception(ValueError("too late to be told"))
    await asyncio.wait((waiting,))  # awaited itself, Python 3.11 would keep its frames and so the work
    assert waiting.cancelled()
    del work, waiting
    gc.collect()
    assert not logged


async def test_without_a_cancellation_it_is_as_if_the_work_were_awaited() -> None:
    work = asyncio.get_running_loop().create_future()
    work.set_result(3)
    assert await outlast(work) == 3
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await outlast(failed)
