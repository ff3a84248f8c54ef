"""A GPU: one stream for steps, one for each direction of copies."""

# torch.cuda has no types of its own.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from moonpool.engine.device.device import DeviceMemory, Launched
from moonpool.runtime.machine.description import describe_machine

Result = TypeVar("Result")

# Runs before a capture: they compile kernels and initialize libraries.
_WARM_UP_RUNS = 2


def gpu_uuids(device: torch.device) -> tuple[str, ...]:
    """Return the driver's UUID of the device; nothing for a CPU."""
    if device.type != "cuda":
        return ()
    return (f"GPU-{torch.cuda.get_device_properties(device).uuid}",)


def machine_of(device: torch.device) -> str:
    """Return the machine in one line, with the GPU if the device is one."""
    gpu = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    return gpu + describe_machine()


@dataclass(frozen=True, slots=True)
class _Launched(Generic[Result]):
    result: Result
    event: torch.cuda.Event
    device: torch.device
    kept: Any = None  # tensors that must live until the end

    def wait(self) -> Result:
        with torch.cuda.device(self.device):
            self.event.synchronize()
        return self.result


def exact_products() -> None:
    """Sum products of 16 bits in float32, also where a product is split: in this process, for all GPUs.

    By default torch lets cuBLAS add partial sums in bfloat16. Their rounding differs with the batch.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: what frees memory or modules of CUDA in this thread would end a capture."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


class CudaDevice:
    """See ``Device``. From any thread: each method makes the device the thread's current one, because CUDA
    allocates memory on a current device at many calls that do not concern it."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch: Any = torch.device("cuda", index)
        exact_products()
        self._steps = torch.cuda.Stream(self.torch)
        self._to_host = torch.cuda.Stream(self.torch)
        self._to_device = torch.cuda.Stream(self.torch)
        self._graph_memory = torch.cuda.graph_pool_handle()

    def run(self, step: Callable[[], Result]) -> Launched[Result]:
        with torch.cuda.stream(self._steps):
            result = step()
            event = torch.cuda.Event()
            event.record(self._steps)
        return _Launched(result, event, self.torch)

    def capture(self, step: Callable[[], Result]) -> Callable[[], Result]:
        with torch.cuda.stream(self._steps):
            for _ in range(_WARM_UP_RUNS):
                step()
        graph = torch.cuda.CUDAGraph()
        # It waits for the current device. Other threads (of transfers) may call CUDA meanwhile.
        with (
            _no_collection(),
            torch.cuda.device(self.torch),
            torch.cuda.graph(
                graph, pool=self._graph_memory, stream=self._steps, capture_error_mode="thread_local"
            ),
        ):
            result = step()

        def replay() -> Result:
            graph.replay()
            return result

        return replay

    def upload(self, host: Tensor) -> Tensor:
        # Pinned first: a copy from pageable memory waits for the whole stream.
        pinned = self._pinned(*host.shape, dtype=host.dtype).copy_(host)
        return pinned.to(self.torch, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        host = self._pinned(*tensor.shape, dtype=tensor.dtype)
        return host.copy_(tensor, non_blocking=True)

    def _pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        with torch.cuda.device(self.torch):
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Launched[None]:
        stream = self._to_host if sources and sources[0].is_cuda else self._to_device
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            # Blocking: waiting for copies is not urgent, and spinning would use a core.
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
        return _Launched(None, event, self.torch, (sources, targets))

    def read(self, work: Callable[[], Result]) -> Launched[Result]:
        with torch.cuda.stream(self._to_host):
            result = work()
            event = torch.cuda.Event(blocking=True)
            event.record(self._to_host)
        return _Launched(result, event, self.torch)

    def memory(self) -> DeviceMemory | None:
        with torch.cuda.device(self.torch):
            free, total = torch.cuda.mem_get_info(self.torch)
            return DeviceMemory(total, free, torch.cuda.memory_reserved(self.torch))

    def reserved_nbytes(self) -> int | None:
        return torch.cuda.memory_reserved(self.torch)

    def peak_nbytes(self, step: Callable[[], object]) -> int:
        with torch.cuda.device(self.torch):
            torch.cuda.synchronize(self.torch)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated(self.torch)
            torch.cuda.reset_peak_memory_stats(self.torch)
            self.run(step).wait()
            peak = torch.cuda.max_memory_reserved(self.torch)
            torch.cuda.empty_cache()
        return peak - before

    def check(self) -> None:
        # An error that destroys the context is the answer to every later call. Not on the stream of steps: a
        # step may wait for a rank that is gone.
        with torch.cuda.device(self.torch):
            event = torch.cuda.Event()
            event.record(self._to_host)
            event.synchronize()
