"""Waiting for work that a cancellation cannot stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


async def outlast(work: asyncio.Future[Result], on_cancel: Callable[[], object] | None = None) -> Result:
    """Wait until ``work`` is done, however often the caller is cancelled, and return its result.

    ``work`` is not cancelled. ``on_cancel`` is called at the first cancellation: it may ask ``work`` to end.
    Raises what ``work`` raises; ``CancelledError`` instead if the caller was cancelled.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((work,))
        if not work.cancelled():
            work.exception()  # retrieved, or asyncio logs it
        raise
