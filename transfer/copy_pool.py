"""The threads that copy memory for an agent. They start when first needed and sleep when idle."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class CopyPool:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work``, which may not raise, on one of the threads. Call on the event loop's thread."""
        self._work.put(work)
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._run, name="moonpool copy", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while work := self._work.get():
            work()

    def close(self) -> None:
        """Finish what was submitted and end the threads. Idempotent."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
