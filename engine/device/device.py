"""Where tensors are computed: what is launched there, and how the host learns that it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Result = TypeVar("Result")
Returned = TypeVar("Returned", covariant=True)


class Event(Protocol):
    """The end of something that was launched."""

    def wait(self) -> None:
        """Return when it has ended; from any thread. Gives Python's global lock up meanwhile."""

    def done(self) -> bool: ...


class Launched(Protocol[Returned]):
    """A step on its way."""

    def wait(self) -> Returned:
        """What the step returned, once all it launched has ended. Raises what it raised."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device's memory, at one moment."""

    total_nbytes: int
    free_nbytes: int  # other processes' share is not in it
    reserved_nbytes: int  # by tensors of this process, and what the allocator keeps for more


class Device(Protocol):
    """A place to compute, with a queue of steps and a queue of copies beside them.

    What a queue is given ends in the order it was given. The queues do not wait for each other: whoever needs
    what the other does waits for it on the host.
    """

    torch: torch.device
    runs_ahead: bool  # launching returns before the work has ended

    def run(self, step: Callable[[], Result]) -> Launched[Result]:
        """Launch a step: ``step`` makes its tensors, uploads and downloads."""

    def capture(self, step: Callable[[], Result]) -> Callable[[], Result]:
        """A call that does what ``step`` does to the memory it does it to, with less work for the host. It
        gives the same tensors each time, with new values. Call it inside ``run``."""

    def upload(self, host: Tensor) -> Tensor:
        """The same on the device, for the step inside ``run`` that asks for it. The host's may change as soon
        as this has returned, except on a CPU, where it is the same tensor."""

    def download(self, tensor: Tensor) -> Tensor:
        """The same in host memory, to be read when the step that asks for it has ended."""

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        """Launch copies between equal tensors, one of each pair in host memory; all stay until the event has
        ended. From any thread."""

    def staging(self, *shape: int) -> npt.NDArray[np.uint8]:
        """Host memory for copies that run by themselves."""

    def memory(self) -> DeviceMemory | None:
        """None where it is the host's own."""

    def peak_nbytes(self, step: Callable[[], object]) -> int:
        """The most memory that ``step`` held beyond what was held before; 0 where it is the host's own."""


class Ended:
    """The event of what had ended before anybody could ask."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _Done(Generic[Result]):
    result: Result

    def wait(self) -> Result:
        return self.result


class CpuDevice:
    """Everything has ended when the call returns."""

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

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return Ended()

    def staging(self, *shape: int) -> npt.NDArray[np.uint8]:
        return np.empty(shape, np.uint8)

    def memory(self) -> DeviceMemory | None:
        return None

    def peak_nbytes(self, step: Callable[[], object]) -> int:
        step()
        return 0
