"""Background tasks that a service cannot do without: they end it with them, or are started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import Counter

from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import failures

log = logging.getLogger(__name__)

VITAL = "vital"
task_failures = Counter(
    "moonpool_task_failures_total",
    "Background tasks that failed, a defect, and were started again.",
    ["task"],
)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
# After a run of this length the pauses are short again.
_LONG_RUN_S = 60.0


def vital(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a background task of a service. Only ``cancel`` or its return may end it.

    An exception goes to the loop's exception handler at once, marked with ``VITAL``: ``run_service`` logs it,
    cancels the service, which closes what it has started, and exits with code 1.
    """
    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(_ended)
    return task


def restarted(
    work: Callable[[], Coroutine[Any, Any, None]],
    name: str,
    kind: str = "",
    on_failure: Callable[[], None] = lambda: None,
) -> asyncio.Task[None]:
    """Start a background task that builds its state anew whenever it is started, so that a failure need not
    end the service: ``work`` runs until it returns or the task is cancelled.

    After an exception, which is logged with its traceback and counted by ``kind`` (by default ``name``),
    ``on_failure`` says so to others, and ``work`` is started again after a pause, which grows up to 10 s. If
    ``on_failure`` fails, the service ends as with ``vital``.
    """

    async def run() -> None:
        clock, num_failures = asyncio.get_running_loop().time, 0
        while True:
            began_s = clock()
            try:
                return await work()
            except (Exception, asyncio.CancelledError) as error:
                if _is_asked(asyncio.current_task(), error):
                    raise
                num_failures = num_failures + 1 if clock() - began_s < _LONG_RUN_S else 1
                # The exponent is bounded, because no float holds 10 ** 309.
                pause_s = min(_FIRST_PAUSE_S * 10 ** min(num_failures - 1, 9), _LONGEST_PAUSE_S)
                log.exception("task %r failed: a defect; it is started again in %g s", name, pause_s)
                task_failures.labels(kind or name).inc()
                failures.count(FailureClass.WORKER, "error")
                on_failure()
            await asyncio.sleep(pause_s)

    return vital(run(), name)


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel ``tasks``, and wait until they have ended, in whatever way. None is no task."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _is_asked(task: asyncio.Task[Any] | None, error: BaseException) -> bool:
    """Whether the task was cancelled. Calls on a closed channel end as if they had been."""
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _ended(task: asyncio.Task[None]) -> None:
    error = asyncio.CancelledError("not cancelled by its owner") if task.cancelled() else task.exception()
    if error is not None and not _is_asked(task, error):
        task.get_loop().call_exception_handler(
            {"message": f"task {task.get_name()!r} ended unexpectedly", "exception": error, VITAL: True}
        )
