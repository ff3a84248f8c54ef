"""Waiting for what torch.distributed has begun, without being bound to its end."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread

import torch
from torch.distributed import Work

_LOOK_S = 0.05


class WorkWaiter:
    """A thread that waits. Only a peer's end, or its answer, ends a wait in Gloo: neither comes from a
    machine that is dark, nor from a process that is stopped; so whoever needs the result looks elsewhere
    meanwhile."""

    def __init__(self, check: Callable[[], None]) -> None:
        """check: raises when it is no use to wait any longer."""
        self._check = check
        self._works: SimpleQueue[Work | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        Thread(target=self._run, name="exchanges", daemon=True).start()

    def wait(self, work: Work) -> None:
        """Until ``work`` is done. Raises what it or ``check`` raises; in the latter case the thread goes on
        waiting, for as long as the peer is silent, and the waiter is of no use any more."""
        self._works.put(work)
        while True:
            try:
                error = self._ends.get(timeout=_LOOK_S)
            except Empty:
                self._check()
                continue
            if error is not None:
                raise error
            return

    def stop(self) -> None:
        """End the thread, when it has nothing to wait for any more."""
        self._works.put(None)

    def _run(self) -> None:
        # Some of torch's works are finished by who waits for them, in tensors of a step.
        with torch.inference_mode():
            while (work := self._works.get()) is not None:
                try:
                    work.wait()
                except Exception as error:
                    self._ends.put(error)
                else:
                    self._ends.put(None)
