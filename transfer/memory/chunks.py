"""A batch as rows of (local, remote, size), and the chunks of rows that are moved one by one."""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moonpool.transfer.memory.span import Spans
from moonpool.transfer.native.arrays import U32, U64, Index


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Runs of bytes: local address, remote region and offset, and size; uint64 [n], region uint32 [n]."""

    address: U64
    region: U32
    offset: U64
    nbytes: U64

    def __len__(self) -> int:
        return len(self.nbytes)

    def __getitem__(self, rows: slice | Index) -> Rows:
        return Rows(self.address[rows], self.region[rows], self.offset[rows], self.nbytes[rows])

    @property
    def total_nbytes(self) -> int:
        return int(self.nbytes.sum())

    @property
    def remote_spans(self) -> Spans:
        return Spans(self.region, self.offset, self.nbytes)

    def based(self, bases: Mapping[int, int]) -> U64:
        """Remote addresses, if region ``id`` begins at ``bases[id]``: uint64 [n]."""
        return based(self.region, self.offset, bases)

    def merged(self, local_region: U32 | None = None) -> Rows:
        """Join rows that are adjacent on both sides, and equal in ``local_region``, uint32 [n]."""
        if len(self) < 2:
            return self
        follows = self.address[:-1] + self.nbytes[:-1] == self.address[1:]
        if not follows.any():
            return self
        follows &= self.region[:-1] == self.region[1:]
        follows &= self.offset[:-1] + self.nbytes[:-1] == self.offset[1:]
        if local_region is not None:
            follows &= local_region[:-1] == local_region[1:]
        if not follows.any():
            return self
        first = np.flatnonzero(np.concatenate(([True], ~follows)))
        return Rows(
            self.address[first], self.region[first], self.offset[first], np.add.reduceat(self.nbytes, first)
        )

    def split(self, most_nbytes: int) -> Rows:
        """Split rows longer than ``most_nbytes``; keep their order."""
        if not len(self) or self.nbytes.max() <= most_nbytes:
            return self
        row, skipped, nbytes = split_runs(self.nbytes, most_nbytes)
        return Rows(self.address[row] + skipped, self.region[row], self.offset[row] + skipped, nbytes)


def based(region: U32, offset: U64, bases: Mapping[int, int]) -> U64:
    """The address of each ``offset``, if region ``id`` begins at ``bases[id]``: uint64 [n]."""
    if len(bases) == 1:
        (base,) = bases.values()
        return offset + np.uint64(base)
    addresses = offset.copy()
    for region_id, base in bases.items():
        addresses[region == region_id] += np.uint64(base)
    return addresses


def split_runs(nbytes: U64, most_nbytes: int) -> tuple[Index, U64, U64]:
    """Split runs into parts of at most ``most_nbytes``: (run, offset in the run, size) of each part."""
    most = np.uint64(most_nbytes)
    counts = ((nbytes + most - np.uint64(1)) // most).astype(np.intp)
    run = np.repeat(np.arange(len(nbytes)), counts)
    first = np.cumsum(counts) - counts
    skipped = (np.arange(len(run)) - first[run]).astype(np.uint64) * most
    return run, skipped, np.minimum(nbytes[run] - skipped, most)


def vectors(address: U64, nbytes: U64) -> U64:
    """An array of struct iovec, uint64 [n, 2]."""
    table = np.empty((len(address), 2), np.uint64)
    table[:, 0] = address
    table[:, 1] = nbytes
    return table


def windows(nbytes: U64, most_rows: int, most_nbytes: int) -> list[tuple[int, int, int]]:
    """Consecutive row ranges (begin, end, bytes): one row, or at most ``most_rows`` and ``most_nbytes``."""
    whole = int(nbytes.sum())
    if 0 < len(nbytes) <= most_rows and whole <= most_nbytes:
        return [(0, len(nbytes), whole)]
    # A list, because a search in it takes a tenth of the time of a call of numpy.
    ends: list[int] = np.cumsum(nbytes).tolist()
    ranges: list[tuple[int, int, int]] = []
    begin, base, count = 0, 0, len(ends)
    while begin < count:
        end = bisect_right(ends, base + most_nbytes, begin, min(begin + most_rows, count))
        end = max(begin + 1, end)
        ranges.append((begin, end, ends[end - 1] - base))
        begin, base = end, ends[end - 1]
    return ranges


@dataclass(frozen=True, slots=True)
class Chunking:
    """Limits of a chunk, in bytes and rows. whole_spans: each row is a whole span, however long."""

    nbytes: int
    rows: int
    whole_spans: bool = False


class ChunkPlan:
    """The rows of a batch, its ``chunks`` (begin, end), and the spans that are complete. Thread-safe."""

    def __init__(
        self, local: Spans, addresses: U64, remote: Spans, chunking: Chunking, *, merge: bool = True
    ) -> None:
        """addresses: of the local spans. merge: join adjacent rows; a chunk may then complete more spans."""
        rows = Rows(addresses, remote.region, remote.offset, local.nbytes)
        if not chunking.whole_spans:
            rows = (rows.merged(local.region) if merge else rows).split(chunking.nbytes)
        self.rows = rows
        self.chunks = [(a, b) for a, b, _ in windows(rows.nbytes, chunking.rows, chunking.nbytes)]
        self.nbytes = rows.total_nbytes
        self._spans = local
        self._lock = threading.Lock()

    @functools.cached_property
    def _progress(self) -> _Progress:
        return _Progress(self._spans.nbytes, self.rows.nbytes, self.chunks)

    def span_at(self, row: int) -> int:
        """The first span with bytes in ``row``."""
        begin = self.rows.nbytes[:row].sum(dtype=np.uint64)
        return int(np.searchsorted(np.cumsum(self._spans.nbytes), begin, side="right"))

    def done(self, chunk: int) -> Index:
        """Note that a chunk was moved. Returns the spans this completed."""
        with self._lock:
            return self._progress.done(chunk)


class _Progress:
    """The chunks missing of each span. Rows keep the order of spans, so both divide the same bytes."""

    def __init__(self, span_nbytes: U64, row_nbytes: U64, chunks: list[tuple[int, int]]) -> None:
        span_end = np.cumsum(span_nbytes)
        chunk_end = np.cumsum(row_nbytes)[[end - 1 for _, end in chunks]]
        chunk_begin = np.concatenate((np.zeros(1, np.uint64), chunk_end[:-1]))
        self._first_span = np.searchsorted(span_end, chunk_begin, side="right")
        self._last_span = np.searchsorted(span_end, chunk_end, side="left")
        # A span is complete when every chunk with bytes of it is done.
        first_chunk = np.searchsorted(chunk_end, span_end - span_nbytes, side="right")
        self._missing = np.searchsorted(chunk_end, span_end, side="left") - first_chunk + 1

    def done(self, chunk: int) -> Index:
        first, last = int(self._first_span[chunk]), int(self._last_span[chunk]) + 1
        missing = self._missing[first:last]
        missing -= 1
        return first + np.flatnonzero(missing == 0)
