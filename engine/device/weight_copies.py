"""Copies of a checkpoint's mapped tensors to a device."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

_SLOT_NBYTES = 64 << 20
_NUM_SLOTS = 3


class Event(Protocol):
    """As ``torch.cuda.Event``."""

    def record(self) -> Any: ...
    def synchronize(self) -> Any: ...


class WeightCopies:
    """To a GPU tensors go through pinned slots: while the copies of some run, the next one is filled, which
    reads the file with all compute threads. A copy from mapped memory would wait for the driver's own.

    Uses the caller's current stream of the device, so that copies keep their order with its kernels there.
    From any thread, one call at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cpu = device.type == "cpu"
        self._slots: list[tuple[Tensor, Event]] = []
        self._turn = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, and convert to the dtype of ``target``. ``source`` may change after the return.

        target, source: of one shape; target is contiguous.
        """
        if self._is_cpu:
            target.copy_(source)
            return
        # An event is recorded on the current device's stream, and pinned memory belongs to its context.
        with torch.cuda.device(self._device):
            self._copy(target, source)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if not source.dim():
            target, source = target[None], source[None]
        row_nbytes = max(1, source[:1].numel() * source.itemsize)
        size = max(1, _SLOT_NBYTES // row_nbytes)
        for first in range(0, len(source), size):
            rows = source[first : first + size]
            memory, event = self._slot(rows.numel() * rows.itemsize)
            event.synchronize()
            slot = memory[: rows.numel() * rows.itemsize].view(rows.dtype).view(rows.shape)
            slot.copy_(rows)
            self._upload(target[first : first + size], slot)
            event.record()

    def _slot(self, nbytes: int) -> tuple[Tensor, Event]:
        """Return the slot that was used longest ago, with room for ``nbytes``, and its event."""
        self._turn = (self._turn + 1) % _NUM_SLOTS
        if len(self._slots) < _NUM_SLOTS:
            self._turn = len(self._slots)
            self._slots.append(self._new_slot(max(nbytes, _SLOT_NBYTES)))
        elif len(self._slots[self._turn][0]) < nbytes:
            self._slots[self._turn][1].synchronize()
            self._slots[self._turn] = self._new_slot(nbytes)
        return self._slots[self._turn]

    def _new_slot(self, nbytes: int) -> tuple[Tensor, Event]:
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), event

    def _upload(self, target: Tensor, slot: Tensor) -> None:
        if slot.dtype != target.dtype:
            # A copy that converts would do so on the host, and wait.
            slot = slot.to(target.device, non_blocking=True)
        target.copy_(slot, non_blocking=True)
