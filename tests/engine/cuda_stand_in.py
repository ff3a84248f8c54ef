"""``torch.cuda`` without a GPU: notes for each call which device was the calling thread's current one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class TorchStandIn:
    """In place of ``torch`` in a module. ``used``: (call, device) of each call for which CUDA would create a
    context on the current device, or fail where that is another one."""

    def __init__(self) -> None:
        self.used: list[tuple[str, int]] = []
        self._thread = threading.local()
        self.cuda = SimpleNamespace(
            current_device=lambda: self.current,
            device=self._on,
            stream=lambda stream: self._on(stream.device),
            Stream=self._stream,
            Event=lambda **_: SimpleNamespace(record=self._noted("record"), synchronize=self._noted("wait")),
            current_stream=lambda device: SimpleNamespace(
                synchronize=lambda: self.used.append(("stream", device.index))
            ),
            CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
            graph=self._graph,
            graph_pool_handle=lambda: 0,
            mem_get_info=self._noted("mem_get_info", (8, 9)),
            memory_reserved=self._noted("memory_reserved", 1),
            memory_allocated=self._noted("memory_allocated", 1),
            max_memory_reserved=self._noted("max_memory_reserved", 3),
            reset_peak_memory_stats=self._noted("reset_peak_memory_stats"),
            empty_cache=self._noted("empty_cache"),
            synchronize=self._noted("synchronize"),
        )

    @property
    def current(self) -> int:
        """The thread's current device; 0 in a new thread, as with CUDA."""
        return getattr(self._thread, "device", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, pin_memory: bool = False, **words: Any) -> torch.Tensor:
        if pin_memory:
            self.used.append(("pin_memory", self.current))
        return torch.empty(*shape, **words)

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        before, self._thread.device = self.current, device.index
        try:
            yield
        finally:
            self._thread.device = before

    def _graph(self, *_: Any, stream: Any, **__: Any) -> Any:
        self.used.append(("graph", self.current))
        return self._on(stream.device)

    def _stream(self, device: torch.device) -> Any:
        return SimpleNamespace(device=device)

    def _noted(self, name: str, answer: Any = None) -> Any:
        def call(*_: Any) -> Any:
            self.used.append((name, self.current))
            return answer

        return call
