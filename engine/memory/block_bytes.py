"""The bytes of the pool's blocks, in main memory or on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moonpool.engine.device.device import Device
from moonpool.kvstore.store import Bytes
from moonpool.transfer import checksum

# Host memory that blocks of a GPU pass through to be hashed.
_STAGING_NBYTES = 8 << 20


class BlockBytes(Protocol):
    """Any thread may call this. A block's bytes may be read once its step has ended, and written while no
    step, copy or peer uses them. All bytes are in place when a call returns.

    needs_loop: the event loop moves the bytes, so that no call may be made on its thread. Any call may raise
    TransferError or RankLost then; what it was to fill is undefined, and nothing writes there any more.
    """

    in_main_memory: bool
    needs_loop: bool

    def view(self, block_id: int) -> Bytes:
        """uint8 [block_nbytes]: the bytes themselves, or where they are not in main memory a copy of them as
        they are now."""

    def copy_out(self, block_ids: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        """Copy blocks to main memory; the checksums of what arrived there."""

    def copy_in(
        self, sources: Sequence[Bytes], block_ids: Sequence[int], checksums: Sequence[int]
    ) -> int | None:
        """Copy blocks from main memory. Returns the first whose source does not match its checksum, or None;
        those before it are in place, the others undefined."""

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """xxh3-64 of the bytes as they are now."""

    async def close(self) -> None:
        """End calls under way with an error, and refuse others. Idempotent."""


class HostBytes:
    """``array``: uint8 [num_blocks, block_nbytes]."""

    in_main_memory = True
    needs_loop = False

    def __init__(self, array: Bytes) -> None:
        self._array = array

    def view(self, block_id: int) -> Bytes:
        view: Bytes = self._array[block_id]
        return view

    def copy_out(self, block_ids: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        for block, destination in zip(block_ids, destinations, strict=True):
            np.copyto(destination, self._array[block])
        return [checksum(destination.data) for destination in destinations]

    def copy_in(
        self, sources: Sequence[Bytes], block_ids: Sequence[int], checksums: Sequence[int]
    ) -> int | None:
        for i, (source, block) in enumerate(zip(sources, block_ids, strict=True)):
            np.copyto(self._array[block], source)
            if checksum(self._array[block].data) != checksums[i]:
                return i
        return None

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        return [checksum(self._array[block].data) for block in block_ids]

    async def close(self) -> None:
        """Calls end by themselves."""


class DeviceBytes:
    """``tensor``: uint8 [num_blocks, block_nbytes]. Checksums are computed in main memory, of the copy there:
    a copy between two GPUs needs none."""

    in_main_memory = False
    needs_loop = False

    def __init__(self, tensor: Tensor, device: Device) -> None:
        self._tensor = tensor
        self._device = device
        num_blocks = max(1, _STAGING_NBYTES // tensor.shape[1])
        self._staging = device.staging(num_blocks, tensor.shape[1])
        self._staging_lock = threading.Lock()

    def view(self, block_id: int) -> Bytes:
        copy: Bytes = np.empty(self._tensor.shape[1], np.uint8)
        self._device.copy([self._tensor[block_id]], [torch.from_numpy(copy)]).wait()
        return copy

    def copy_out(self, block_ids: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        targets = [torch.from_numpy(destination) for destination in destinations]
        self._device.copy([self._tensor[block] for block in block_ids], targets).wait()
        return [checksum(destination.data) for destination in destinations]

    def copy_in(
        self, sources: Sequence[Bytes], block_ids: Sequence[int], checksums: Sequence[int]
    ) -> int | None:
        copies = self._device.copy(
            [torch.from_numpy(source) for source in sources], [self._tensor[block] for block in block_ids]
        )
        # Hashed while they are on their way: what is copied is what lies there.
        wrong = (i for i, source in enumerate(sources) if checksum(source.data) != checksums[i])
        try:
            return next(wrong, None)
        finally:
            copies.wait()

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        found: list[int] = []
        with self._staging_lock:
            size = len(self._staging)
            for first in range(0, len(block_ids), size):
                some = block_ids[first : first + size]
                found += self.copy_out(some, list(self._staging[: len(some)]))
        return found

    async def close(self) -> None:
        """Calls end by themselves."""
