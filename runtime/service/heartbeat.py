"""A process telling those who depend on it that it runs, and how they notice that it does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

BEATS_PER_TIMEOUT = 20


class Heartbeat:
    """Beats on a thread of its own, so that only a process that is stopped or gone falls silent: an event
    loop that is busy for a while does not."""

    def __init__(self, beat: Callable[[], None], every_s: float) -> None:
        """``beat`` is called at once, and then every ``every_s`` by the thread."""
        self._beat_once = beat
        self._every_s = every_s
        self._stopped = threading.Event()
        beat()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; no call of ``beat`` is left when this returns. Idempotent."""
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._beat_once()


async def until_silent(num_beats: Callable[[], int], bound_s: Callable[[], float], look_s: float) -> None:
    """Return when ``num_beats()``, looked at every ``look_s``, has stayed the same for ``bound_s()``, which
    may change meanwhile.

    The time counts in our own looks: while this process is stopped itself, or gets no processor, nobody is
    found silent whose beats only wait to be read.
    """
    seen, silent_s = num_beats(), 0.0
    while silent_s < bound_s():
        await asyncio.sleep(look_s)
        silent_s += look_s
        if (now := num_beats()) != seen:
            seen, silent_s = now, 0.0
