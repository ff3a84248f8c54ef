"""The client's memory as the transfer uses it: registered for one call, or once for many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from moonpool.kvstore.client.arrays import as_buffer
from moonpool.kvstore.client.errors import BadObject
from moonpool.transfer import Region, Span, TransferAgent
from moonpool.transfer.memory.adoption import adopt
from moonpool.transfer.native.arrays import address_of


@dataclass(frozen=True, slots=True)
class BorrowedBuffer:
    """``nbytes`` bytes of a region from ``offset``. ``close`` it after the last transfer; idempotent."""

    region: Region
    offset: int
    nbytes: int
    owned: bool  # the region is this buffer's alone

    def close(self) -> None:
        if self.owned:
            self.region.close()

    def spans(self, chunk_nbytes: int) -> list[Span]:
        """One span for each chunk, the last one shorter."""
        end = self.offset + self.nbytes
        return [
            Span(self.region.id, at, min(chunk_nbytes, end - at))
            for at in range(self.offset, end, chunk_nbytes)
        ]


class LocalMemory:
    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self._kept: list[Region] = []

    @contextmanager
    def registered(self, buffer: Any) -> Iterator[None]:
        """Inside the block, parts of ``buffer`` are borrowed without registering. Raises ``BadObject``."""
        region = self._register(buffer, writable=True)
        self._kept.append(region)
        try:
            yield
        finally:
            self._kept.remove(region)
            region.close()

    def borrow(self, value: Any, *, writable: bool) -> BorrowedBuffer:
        """The value's own bytes, at least one. Raises ``BadObject``: not contiguous, not in host memory, or
        read-only although ``writable``."""
        if self._kept:
            memory = self._adopt(value, writable=writable).array
            address = address_of(memory)
            for region in self._kept:
                if region.address <= address and address + memory.nbytes <= region.address + region.nbytes:
                    return BorrowedBuffer(region, address - region.address, memory.nbytes, owned=False)
        region = self._register(value, writable=writable)
        return BorrowedBuffer(region, 0, region.nbytes, owned=True)

    def bytes_of(self, value: Any, *, writable: bool) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The value's own bytes, without registering them. Raises ``BadObject`` as ``borrow``."""
        memory: np.ndarray[Any, np.dtype[np.uint8]] = self._adopt(value, writable=writable).array
        return memory

    def allocate(self, nbytes: int) -> BorrowedBuffer:
        """New memory, prefaulted and in huge pages; it lives as long as a view of its array."""
        return BorrowedBuffer(self._agent.allocate(nbytes, "get"), 0, nbytes, owned=True)

    def _register(self, value: Any, *, writable: bool) -> Region:
        with _usable():
            return self._agent.register(as_buffer(value), writable=writable)

    def _adopt(self, value: Any, *, writable: bool) -> Any:
        with _usable():
            return adopt(as_buffer(value), writable)


@contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        raise BadObject(f"this memory cannot be used: {error}") from error


def part_of(buffer: BorrowedBuffer, offset: int, nbytes: int) -> BorrowedBuffer:
    """A part of a buffer, which stays the one to close."""
    return BorrowedBuffer(buffer.region, buffer.offset + offset, nbytes, owned=False)


def bytes_of(buffer: BorrowedBuffer) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [nbytes], a view."""
    view: np.ndarray[Any, np.dtype[np.uint8]] = buffer.region.array[
        buffer.offset : buffer.offset + buffer.nbytes
    ]
    return view
