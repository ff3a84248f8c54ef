"""A GPU in miniature: CPU tensors, steps whose end comes when the test lets it, copies that are done then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moonpool.engine.device.device import DeviceMemory


@dataclass
class LateEvent:
    future: Future[Any]
    result: Any = None

    def wait(self) -> Any:
        return self.future.result(timeout=30)


class Queue:
    """Runs what it is given in order; after ``hold`` only as much as is ``let`` through."""

    def __init__(self) -> None:
        self.num_given = 0
        self._held = False
        self._permits = threading.Semaphore(0)
        self._thread = ThreadPoolExecutor(1)

    def hold(self) -> None:
        self._held = True

    def let(self, n: int) -> None:
        self._permits.release(n)

    def release(self) -> None:
        self._held = False
        self._permits.release(1000)

    def give(self, work: Callable[[], Any]) -> LateEvent:
        def later() -> Any:
            if self._held:
                assert self._permits.acquire(timeout=30), "the test never let it through"
            return work()

        self.num_given += 1
        return LateEvent(self._thread.submit(later))

    async def until_given(self, n: int) -> None:
        """Until ``n`` works were given in all, and the loop has had time to act on what it should not."""
        async with asyncio.timeout(30):
            while self.num_given < n:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        for _ in range(50):
            await asyncio.sleep(0)


@dataclass
class LateDevice:
    """``steps`` and ``copies`` are the two queues; ``free`` what ``memory`` says is free."""

    free: DeviceMemory = field(default_factory=lambda: DeviceMemory(1 << 33, 1 << 33, 0))
    steps: Queue = field(default_factory=Queue)
    copies: Queue = field(default_factory=Queue)
    torch: Any = torch.device("cpu")
    runs_ahead: bool = True
    num_replays: int = 0
    error: Exception | None = None  # that every call has from now on

    def run(self, step: Callable[[], Any]) -> Any:
        torch.set_num_threads(1)
        result = step()

        def later() -> Any:
            if self.error is not None:
                raise self.error
            return result

        event = self.steps.give(later)
        event.result = result
        return event

    def capture(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        result = step().clone()

        def replay() -> Tensor:
            self.num_replays += 1
            return result.copy_(step())

        return replay

    def upload(self, host: Tensor) -> Tensor:
        return host.clone()

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> LateEvent:
        def later() -> None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

        return self.copies.give(later)

    def read(self, work: Callable[[], Any]) -> LateEvent:
        return self.copies.give(work)

    def memory(self) -> DeviceMemory:
        return self.free

    def reserved_nbytes(self) -> int:
        return self.free.reserved_nbytes

    def peak_nbytes(self, step: Callable[[], object]) -> int:
        self.run(step).wait()
        return 1 << 20

    def check(self) -> None:
        if self.error is not None:
            raise self.error
