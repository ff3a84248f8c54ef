"""The protocol of a compute device: launch steps and copies, wait for their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Returned = TypeVar("Returned", covariant=True)


class Launched(Protocol[Returned]):
    """A running step or copy."""

    @property
    def result(self) -> Returned:
        """What the step returned: tensors that later launches may use, values once it has ended."""

    def wait(self) -> Returned:
        """Return the result after everything launched has ended. From any thread; releases the GIL meanwhile.
        Raises the step's error."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Current memory of a device, in bytes."""

    total_nbytes: int
    free_nbytes: int  # memory of other processes is not free
    reserved_nbytes: int  # by this process: its tensors and the allocator's cache


class Device(Protocol):
    """A compute device with a queue of steps and a queue of copies.

    Each queue keeps its order. The queues do not wait for each other; the host synchronizes them.
    """

    torch: torch.device
    runs_ahead: bool  # launches return before the work has ended

    def run(self, step: Callable[[], Result]) -> Launched[Result]:
        """Launch ``step``, which may use ``upload`` and ``download``."""

    def capture(self, step: Callable[[], Result]) -> Callable[[], Result]:
        """Record ``step``. Returns a replay on the same memory, to be called inside ``run``; it returns
        the same tensors with new values."""

    def upload(self, host: Tensor) -> Tensor:
        """Copy to the device, for the current step. The host tensor may change afterwards, except on a CPU,
        where it is the same tensor."""

    def download(self, tensor: Tensor) -> Tensor:
        """Copy to host memory, valid when the current step has ended."""

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Launched[None]:
        """Launch copies between equal tensors, one of each pair in host memory. From any thread. Keep all
        tensors until the event has ended."""

    def read(self, work: Callable[[], Result]) -> Launched[Result]:
        """Launch ``work``, which only reads finished memory, beside the steps, in order with copies to the
        host. From any thread."""

    def memory(self) -> DeviceMemory | None:
        """Return the device's memory; None for host memory."""

    def reserved_nbytes(self) -> int | None:
        """Return the bytes that this process has reserved, without a call of the device, which may hang; None
        for host memory."""

    def peak_nbytes(self, step: Callable[[], object]) -> int:
        """Run ``step`` and return the peak of its additional memory; 0 for host memory."""

    def check(self) -> None:
        """Raise the device's error if this process can use it no more, whatever it asks of it. Does not wait
        for steps."""


@dataclass(frozen=True, slots=True)
class _Done(Generic[Result]):
    result: Result

    def wait(self) -> Result:
        return self.result


class CpuDevice:
    """Runs everything synchronously."""

    torch: Any = torch.device("cpu")
    runs_ahead = False

    def run(self, step: Callable[[], Result]) -> Launched[Result]:
        return _Done(step())

    def capture(self, step: Callable[[], Result]) -> Callable[[], Result]:
        return step

    def upload(self, host: Tensor) -> Tensor:
        return host

    def download(self, tensor: Tensor) -> Tensor:
        return tensor

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Launched[None]:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return _Done(None)

    def read(self, work: Callable[[], Result]) -> Launched[Result]:
        return _Done(work())

    def memory(self) -> DeviceMemory | None:
        return None

    def reserved_nbytes(self) -> int | None:
        return None

    def peak_nbytes(self, step: Callable[[], object]) -> int:
        step()
        return 0

    def check(self) -> None:
        """Host memory is not lost."""
