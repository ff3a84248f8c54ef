"""The KV memory of the engine as pages, one for each block and layer, copied as they are.

vLLM packs K and V inside a page by the processor's instructions, so a page has no meaning here.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from moonpool.connectors.errors import Unsupported
from moonpool.kvstore.tiers.protocols import Bytes


class Pages:
    """A block's bytes are its pages in the order of the layers' names in ``caches``.

    ``caches``: by layer, [num_blocks, …] in main memory. Raises ``Unsupported``.
    """

    def __init__(self, caches: Mapping[str, Tensor]) -> None:
        # Layers may share their cache.
        tensors = list({tensor.data_ptr(): tensor for tensor in caches.values()}.values())
        self._layers = [_pages_of(tensor) for tensor in tensors]
        if len({len(layer) for layer in self._layers}) != 1:
            raise Unsupported("layers with different numbers of blocks (several KV cache groups)")
        ends = np.cumsum([0, *(layer.shape[1] for layer in self._layers)])
        self._ranges = [slice(int(a), int(b)) for a, b in pairwise(ends)]
        self.num_blocks = len(self._layers[0])
        self.block_nbytes = int(ends[-1])

    def copy_out(self, blocks: Sequence[int], spans: Sequence[Bytes]) -> None:
        """Copy each block to a span, uint8 [block_nbytes]."""
        for layer, part in zip(self._layers, self._ranges, strict=True):
            for block, span in zip(blocks, spans, strict=True):
                np.copyto(span[part], layer[block])

    def copy_in(self, spans: Sequence[Bytes], blocks: Sequence[int]) -> None:
        """Fill each block from a span, uint8 [block_nbytes]."""
        for layer, part in zip(self._layers, self._ranges, strict=True):
            for block, span in zip(blocks, spans, strict=True):
                np.copyto(layer[block], span[part])


class PageReading:
    """Pages are read on a thread, and the engine may change them only when that has ended."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._is_abandoned = False
        self._lock = threading.Lock()  # one of both sides decides whether the end was in time

    def end(self) -> bool:
        """The pages are no longer read. Returns whether they did not change meanwhile. Idempotent."""
        with self._lock:
            self._ended.set()
            return not self._is_abandoned

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end. False: the wait was too long, and what was read must not be used."""
        self._ended.wait(timeout_s)
        with self._lock:
            self._is_abandoned = not self._ended.is_set()
            return not self._is_abandoned


def _pages_of(tensor: Tensor) -> Bytes:
    """uint8 [num_blocks, page_nbytes], a view."""
    if tensor.device.type != "cpu":
        raise Unsupported(f"KV caches on {tensor.device}: so far this connector copies from main memory only")
    if not tensor[0].is_contiguous():
        raise Unsupported(f"KV caches of shape {tuple(tensor.shape)} and strides {tensor.stride()}")
    size = tensor.element_size()
    page_nbytes = tensor[0].numel() * size
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    offset = tensor.storage_offset() * size
    view = whole.as_strided((len(tensor), page_nbytes), (tensor.stride(0) * size, 1), offset)
    pages: Bytes = view.numpy()
    return pages
