"""Background tasks that a service cannot do without."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

VITAL = "vital"


def vital(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a background task of a service. Only ``cancel`` or its return may end it.

    An exception goes to the loop's exception handler at once, marked with ``VITAL``: ``run_service`` logs it,
    cancels the service, which closes what it has started, and exits with code 1.
    """
    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": f"task {task.get_name()!r} ended unexpectedly", "exception": error, VITAL: True}
        )
