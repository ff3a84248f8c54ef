"""Noticing that an attempt stands still: a link that was cut says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.errors import PathFailed
from moonpool.transfer.paths.base import Path

# The share of the time that is left, and its bounds, after which what has not moved is taken to be stuck.
# Short enough to leave time for another way, long enough for a lost packet or two and a busy processor.
_SHARE = 1 / 8
_MIN_S = 0.125
_MAX_S = 1.0


class StallWatch:
    """Looks at an attempt now and then, from its start until ``cancel``. On the event loop's thread.

    What carries it and has moved nothing from one look to the next is dropped, if the path has another way;
    else, if the batch has ``elsewhere`` to go, the attempt is stopped with PathFailed. If neither is so there
    is nothing better than to wait for the deadline.
    """

    def __init__(self, path: Path, attempt: Attempt, *, elsewhere: bool) -> None:
        self._path = path
        self._attempt = attempt
        self._elsewhere = elsewhere
        self._seen: Mapping[object, int] = {}
        self._every_s = min(max(attempt.deadline_s() * _SHARE, _MIN_S), _MAX_S)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._every_s, self._look)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        seen, self._seen = self._seen, self._path.progress(self._attempt)
        stuck = [carrier for carrier, moved in self._seen.items() if seen.get(carrier) == moved]
        if stuck and not self._path.drop(stuck) and self._elsewhere and len(stuck) == len(self._seen):
            reason = f"nothing has moved for {self._every_s:.3g} s"
            self._attempt.stop(PathFailed(self._path.name, reason))
            return
        self._timer = self._loop.call_later(self._every_s, self._look)
