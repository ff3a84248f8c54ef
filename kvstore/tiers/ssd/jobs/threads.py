"""The threads of a tier's I/O, and how long each call to the disk has lasted."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from moonpool.kvstore.tiers.protocols import Bytes
from moonpool.transfer.memory.allocation import HUGE_PAGE_NBYTES, allocate

log = logging.getLogger(__name__)


class Job(Protocol):
    """System calls. ``about`` describes the current one, for the log if it does not return."""

    @property
    def about(self) -> str: ...

    def run(self, worker: Worker) -> None:
        """An exception is a bug, and logged."""


class Worker:
    def __init__(self, buffer: Bytes, depth: threading.Semaphore, clock: Callable[[], float]) -> None:
        self.buffer = buffer  # its own, page-aligned, in huge pages
        self.job: Job | None = None
        self._depth = depth
        self._clock = clock
        self._since_s: float | None = None

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Surround every call to the disk: wait until one more may run, and measure its time."""
        with self._depth:
            self._since_s = self._clock()
            try:
                yield
            finally:
                self._since_s = None

    @property
    def in_call_s(self) -> float:
        """Seconds its current call to the disk has lasted; 0: it is in none."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s


class IoThreads:
    """Threads with two queues; urgent jobs, for which requests wait, go first.

    ``depth`` calls run at a time, with one thread more, so that the disk stays busy while one copies or
    verifies. The threads are daemons: one that hangs in a system call does not keep the process from ending.
    """

    def __init__(self, name: str, depth: int, buffer_nbytes: int, clock: Callable[[], float]) -> None:
        """``buffer_nbytes`` of each thread; 0: its jobs only call the disk."""
        self._clock = clock
        self._urgent: deque[Job] = deque()
        self._other: deque[Job] = deque()
        self._ready = threading.Condition()
        self._closed = False
        # Huge pages: a disk's DMA into 1 MiB of scattered small pages reaches a third of its speed.
        nbytes = max(buffer_nbytes, HUGE_PAGE_NBYTES) if buffer_nbytes else 0
        calls = threading.Semaphore(depth)
        buffers = (
            allocate(nbytes, name, "anonymous").array if nbytes else np.empty(0, np.uint8)
            for _ in range(depth + 1 if nbytes else depth)
        )
        self._workers = [Worker(buffer, calls, clock) for buffer in buffers]
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, *, urgent: bool = False) -> None:
        with self._ready:
            (self._urgent if urgent else self._other).append(job)
            self._ready.notify()

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    def longest(self) -> tuple[float, str]:
        """Seconds of the oldest call under way, and what it is about; (0, ""): none."""
        oldest = (0.0, "")
        for worker in self._workers:
            job, in_call_s = worker.job, worker.in_call_s
            if job is not None and in_call_s > oldest[0]:
                oldest = (in_call_s, job.about)
        return oldest

    def close(self, timeout_s: float) -> bool:
        """End the threads once the queues are empty. False: one hangs in a system call."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - self._clock(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, worker: Worker) -> None:
        while (job := self._next()) is not None:
            worker.job = job
            try:
                job.run(worker)
            except Exception:
                # A bug: jobs handle disk errors themselves. The job has ended its batch; the thread must go
                # on, or the jobs queued behind it would never run.
                log.exception("a job failed in a way it should not: %s", job.about)
            worker.job = None

    def _next(self) -> Job | None:
        with self._ready:
            while not self._urgent and not self._other:
                if self._closed:
                    return None
                self._ready.wait()
            return (self._urgent or self._other).popleft()
