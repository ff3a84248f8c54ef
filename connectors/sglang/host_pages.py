"""Pages of an SGLang host pool, as runs of bytes in its memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from moonpool.connectors.errors import Unsupported
from moonpool.kvstore.tiers.protocols import Bytes


class HostPool(Protocol):
    """What is read of SGLang's ``HostKVCache`` and its like; some have ``get_hybrid_pool_buffer`` too."""

    layout: str
    page_size: int
    kv_buffer: Any

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]: ...


class HostPages:
    """Each page is the same number of runs, ``run_nbytes`` each: K and V where pages come first, a run a
    layer where layers do."""

    def __init__(self, pool: HostPool) -> None:
        """Raises ``Unsupported``: the pool's memory or layout cannot be read as pages."""
        self._pool = pool
        self._page_size = pool.page_size or 1
        self.memory = [bytes_of(tensor) for tensor in _tensors(pool) if tensor.numel()]
        self.memory.sort(key=_address)
        self._starts = [_address(memory) for memory in self.memory]
        first = torch.arange(self._page_size)
        try:
            self.run_nbytes = [int(size) for size in pool.get_page_buffer_meta(first)[1]]
            self.runs(first, 1)
        except (NotImplementedError, ValueError) as error:
            name, layout = type(pool).__name__, pool.layout
            raise Unsupported(f"pages of {name}, layout {layout}, cannot be stored: {error}") from error

    @property
    def page_nbytes(self) -> int:
        return sum(self.run_nbytes)

    def runs(self, host_indices: Tensor, num_pages: int) -> list[list[Bytes]]:
        """The runs of each page, uint8, views. ``host_indices``: of the tokens, [num_pages * page_size].

        Raises ``ValueError``: the pool describes another number of pages, or memory that is not its own.
        """
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        count = len(self.run_nbytes)
        if len(addresses) != num_pages * count or list(sizes) != self.run_nbytes * num_pages:
            raise ValueError(
                f"the pool describes {len(addresses)} runs of memory for {num_pages} pages of {count} each"
            )
        runs = [self._view(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return [runs[first : first + count] for first in range(0, len(runs), count)]

    def _view(self, address: int, nbytes: int) -> Bytes:
        at = bisect_right(self._starts, address) - 1
        offset = address - self._starts[at] if at >= 0 else -1
        if offset < 0 or offset + nbytes > self.memory[at].nbytes:
            raise ValueError(f"the pool describes {nbytes} bytes at {address:#x}, which are not its own")
        return self.memory[at][offset : offset + nbytes]


def copy_out(runs: Sequence[Bytes], into: Bytes) -> None:
    """Put the runs of a page one behind the other."""
    np.concatenate(runs, out=into)


def copy_in(page: Bytes, runs: Sequence[Bytes]) -> None:
    """The reverse of ``copy_out``."""
    start = 0
    for run in runs:
        np.copyto(run, page[start : start + run.nbytes])
        start += run.nbytes


def _tensors(pool: HostPool) -> list[Tensor]:
    get = getattr(pool, "get_hybrid_pool_buffer", None)
    found = pool.kv_buffer if get is None else get()
    return [found] if isinstance(found, Tensor) else list(found)


def bytes_of(tensor: Tensor) -> Bytes:
    """uint8 [nbytes], a view."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise Unsupported(
            f"host memory on {tensor.device} with strides {tensor.stride()}; it must be contiguous"
        )
    flat: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return flat


def _address(memory: Bytes) -> int:
    return int(memory.ctypes.data)
