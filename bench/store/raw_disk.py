"""The limit of a tier on disk: the same bytes by O_DIRECT alone, of the same size, depth and order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moonpool.bench.store.block_set import Bytes, Shape
from moonpool.transfer.memory.allocation import allocate


class RawDisk:
    """One file that has been written before. Blocks are written from, and read into, huge pages, where the
    disk reaches most."""

    def __init__(self, path: Path, shape: Shape, threads: int, source: Sequence[Bytes]) -> None:
        self._shape = shape
        self._threads = threads
        self._blocks = allocate(shape.nbytes, "raw", "anonymous").array.reshape(shape.num_blocks, -1)
        for block, bytes_ in zip(self._blocks, source, strict=True):
            block[:] = bytes_
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, shape.nbytes)
        self.write()

    def close(self) -> None:
        os.close(self._fd)

    def write(self) -> float:
        """Seconds for all blocks, a sync after each batch."""
        return self._pass(range(self._shape.num_blocks), os.pwritev, sync=True)

    def read(self, order: Sequence[int]) -> float:
        return self._pass(order, os.preadv, sync=False)

    def _pass(self, order: Sequence[int], call: Callable[..., int], *, sync: bool) -> float:
        started = time.perf_counter()
        for batch in self._shape.batches():
            todo = iter(list(order[batch]))
            threads = [threading.Thread(target=self._work, args=(todo, call)) for _ in range(self._threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if sync:
                os.fdatasync(self._fd)
        return time.perf_counter() - started

    def _work(self, todo: Iterator[int], call: Callable[..., int]) -> None:
        nbytes = self._shape.block_nbytes
        for number in todo:
            moved = call(self._fd, [self._blocks[number]], number * nbytes)
            if moved != nbytes:
                raise OSError(f"{moved} of {nbytes} bytes were moved")
