"""The bytes of the pool's blocks, in main memory or on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moonpool.engine.device.device import Device
from moonpool.kernels.dispatch import checksum_spans
from moonpool.kvstore.store import Bytes
from moonpool.transfer import Checksums, checksum
from moonpool.transfer.native.arrays import U64


class BlockBytes(ABC):
    """Access to blocks from any thread. Read a block after its step has ended; write it while no step, copy
    or peer uses it. Calls are synchronous.

    in_main_memory: False: blocks are elsewhere, or in parts. needs_loop: the event loop moves the bytes, so
    calls are forbidden on its thread and may raise TransferError or RankLost. The destination is undefined
    then, and nothing writes to it any more.
    """

    in_main_memory = False
    needs_loop = False
    block_nbytes: int

    def view(self, block_id: int) -> Bytes:
        """Return uint8 [block_nbytes]: the bytes themselves in main memory, otherwise a copy."""
        whole: Bytes = np.empty(self.block_nbytes, np.uint8)
        self.copy_out([block_id], [whole])
        return whole

    @abstractmethod
    def copy_out(self, block_ids: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        """Copy blocks to main memory. Return the checksums of the copies."""

    @abstractmethod
    def copy_in(
        self, sources: Sequence[Bytes], block_ids: Sequence[int], checksums: Sequence[int]
    ) -> int | None:
        """Copy blocks from main memory. Return None, or the index of the first source with a wrong checksum;
        blocks from there on are undefined."""

    @abstractmethod
    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Return xxh3-64 of the current bytes."""

    async def close(self) -> None:  # noqa: B027 (most calls are short: there is nothing to end)
        """End running calls with an error and reject others. Idempotent."""


class HostBytes(BlockBytes):
    """``array``: uint8 [num_blocks, block_nbytes]."""

    in_main_memory = True

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


def device_checksums(pool: Tensor, device: Device) -> Checksums:
    """Return a function that computes xxh3-64 on the device, from any thread: of ``nbytes[i]`` bytes from
    ``offsets[i]`` of ``pool`` on, uint64 [n]. Nothing writes these bytes meanwhile."""
    memory = pool.view(torch.uint8).view(-1)

    @torch.inference_mode()
    def checksums(offsets: U64, nbytes: U64) -> U64:
        where = [torch.from_numpy(np.ascontiguousarray(each).view(np.int64)) for each in (offsets, nbytes)]
        found = device.read(lambda: device.download(checksum_spans(memory, *where))).wait()
        return found.numpy().view(np.uint64)

    return checksums


class DeviceBytes(BlockBytes):
    """``tensor``: uint8 [num_blocks, block_nbytes]."""

    def __init__(self, tensor: Tensor, device: Device) -> None:
        self.block_nbytes = tensor.shape[1]
        self._tensor = tensor
        self._device = device
        self._checksums = device_checksums(tensor, device)

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
        # Hashed during the copy: the sources do not change.
        wrong = (i for i, source in enumerate(sources) if checksum(source.data) != checksums[i])
        try:
            return next(wrong, None)
        finally:
            copies.wait()

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        offsets = np.array(block_ids, np.uint64) * np.uint64(self.block_nbytes)
        found: list[int] = self._checksums(offsets, np.full_like(offsets, self.block_nbytes)).tolist()
        return found
