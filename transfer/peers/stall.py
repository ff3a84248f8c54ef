"""Detection of stalled attempts. A cut link reports nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.errors import PathFailed
from moonpool.transfer.paths.base import Path

# Time without progress that counts as a stall: a fraction of the time left, within bounds. It must leave time
# for another path, and tolerate a few lost packets and a busy processor.
_FRACTION = 1 / 8
_MIN_S = 0.125
_MAX_S = 1.0


class StallWatch:
    """Checks an attempt periodically, from its creation until ``cancel``. On the event loop's thread.

    Carriers (connections) without progress between two checks are dropped, if the path has others. Otherwise
    the attempt is stopped with PathFailed, if another path is ``untried``. Otherwise it runs to the deadline.
    """

    def __init__(self, path: Path, attempt: Attempt, *, untried: bool) -> None:
        self._path = path
        self._attempt = attempt
        self._untried = untried
        self._seen: Mapping[object, int] = {}
        self._every_s = min(max(attempt.request.seconds_left() * _FRACTION, _MIN_S), _MAX_S)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._every_s, self._look)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        seen, self._seen = self._seen, self._path.progress(self._attempt)
        stuck = [carrier for carrier, moved in self._seen.items() if seen.get(carrier) == moved]
        if stuck and not self._path.drop(stuck) and self._untried and len(stuck) == len(self._seen):
            reason = f"nothing has moved for {self._every_s:.3g} s"
            self._attempt.stop(PathFailed(self._path.name, reason))
            return
        self._timer = self._loop.call_later(self._every_s, self._look)
