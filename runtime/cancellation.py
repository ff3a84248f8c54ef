"""Waiting for work that a cancellation cannot stop."""

from __future__ import annotations

import asyncio
from typing import Any


async def outlast(work: asyncio.Future[Any]) -> None:
    """Wait until ``work`` is done, however often the caller is cancelled; then raise ``CancelledError`` if it
    was. ``work`` is not cancelled, and its result or error is left to the caller."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
