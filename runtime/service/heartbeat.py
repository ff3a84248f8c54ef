"""Heartbeats of a process, and detection of their end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

BEATS_PER_TIMEOUT = 20


class Heartbeat:
    """Calls ``beat`` from a thread, so that it continues while the event loop is busy.

    It ends only when the process is stopped or dead.
    """

    def __init__(self, beat: Callable[[], None], every_s: float) -> None:
        """Call ``beat`` at once, and then every ``every_s`` seconds from the thread."""
        self._beat_once = beat
        self._every_s = every_s
        self._stopped = threading.Event()
        beat()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; no call of ``beat`` is in progress when this returns. Idempotent."""
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._beat_once()


async def until_silent(num_beats: Callable[[], int], bound_s: Callable[[], float], look_s: float) -> None:
    """Return once ``num_beats()``, polled every ``look_s``, is unchanged for ``bound_s()``, which may vary.

    Time is counted in polls, not by the clock: if this process itself is stopped or gets no CPU, heartbeats
    that are waiting to be read do not count as silence.
    """
    seen, silent_s = num_beats(), 0.0
    while silent_s < bound_s():
        await asyncio.sleep(look_s)
        silent_s += look_s
        if (now := num_beats()) != seen:
            seen, silent_s = now, 0.0
