"""Spans: bytes of a region."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.transfer.errors import SpanError
from moonpool.transfer.native.arrays import U32, U64, Index


@dataclass(frozen=True, slots=True)
class Span:
    """``nbytes`` bytes at ``offset`` in region ``region``, local or remote by context."""

    region: int
    offset: int
    nbytes: int


_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Many spans in columns: region uint32 [n], offset uint64 [n], nbytes uint64 [n]."""

    region: U32
    offset: U64
    nbytes: U64

    def __post_init__(self) -> None:
        if not len(self.region) == len(self.offset) == len(self.nbytes):
            raise SpanError(0, "the columns of Spans differ in length")

    def __len__(self) -> int:
        return len(self.region)

    @property
    def total_nbytes(self) -> int:
        return int(self.nbytes.sum())

    def take(self, which: Index) -> Spans:
        """The spans with these indices."""
        return Spans(self.region[which], self.offset[which], self.nbytes[which])

    @classmethod
    def of(cls, spans: Sequence[Span] | Spans) -> Spans:
        """Columns of ``spans``. Raises SpanError: a value is not an integer, negative, or too large."""
        if isinstance(spans, Spans):
            return cls(
                _column(spans.region, np.uint32),
                _column(spans.offset, np.uint64),
                _column(spans.nbytes, np.uint64),
            )
        try:
            # array.array is fast, and refuses floats and negative numbers.
            return cls(
                np.frombuffer(array("I", [span.region for span in spans]), np.uint32),
                np.frombuffer(array("Q", [span.offset for span in spans]), np.uint64),
                np.frombuffer(array("Q", [span.nbytes for span in spans]), np.uint64),
            )
        except (TypeError, OverflowError, AttributeError):
            raise _first_bad(spans) from None

    @classmethod
    def blocks(cls, region: int, offsets: npt.ArrayLike, nbytes: int) -> Spans:
        """One span of ``nbytes`` at each of ``offsets`` in one region: the blocks of a paged pool."""
        column = np.asarray(offsets).astype(np.uint64)
        return cls(np.full(len(column), region, np.uint32), column, np.full(len(column), nbytes, np.uint64))


def _column(
    values: npt.NDArray[np.unsignedinteger], dtype: type[np.unsignedinteger]
) -> npt.NDArray[np.unsignedinteger]:
    column = np.asarray(values)
    if column.ndim != 1 or column.dtype.kind not in "ui":
        raise SpanError(
            0, f"a column of Spans must be one-dimensional integers, not {column.dtype}{list(column.shape)}"
        )
    if column.dtype.kind == "i" and len(column) and int(column.min()) < 0:
        raise SpanError(int(column.argmin()), "negative offset, size or region")
    return np.ascontiguousarray(column, dtype)


def _first_bad(spans: Sequence[Span]) -> SpanError:
    for index, span in enumerate(spans):
        for name, limit in (("region", 1 << 32), ("offset", 1 << 64), ("nbytes", 1 << 64)):
            value = getattr(span, name, None)
            if not isinstance(value, int) or not 0 <= value < limit:
                return SpanError(index, f"{name} must be an integer from 0 to {limit - 1}, got {value!r}")
    return SpanError(0, "spans must be a sequence of Span")


def region_ids(spans: Spans) -> list[int]:
    """The distinct regions. Fast for one region, the usual case."""
    first = spans.region[0]
    if len(spans) == 1 or bool((spans.region == first).all()):
        return [int(first)]
    return np.unique(spans.region).tolist()  # type: ignore[no-any-return]


def spans_in(spans: Spans, region_id: int, ids: list[int]) -> Index:
    """Indices of the spans in ``region_id``. ids: ``region_ids(spans)``."""
    if len(ids) == 1:
        return np.arange(len(spans))
    return np.flatnonzero(spans.region == region_id)


def plain_columns(local: Spans, remote: Spans) -> bool:
    """Whether the columns have the types and the dimension that ``Spans`` says."""
    # Written out, because a loop would take a microsecond of the ten of a small read.
    offset, nbytes, region, there = local.offset, local.nbytes, local.region, remote.offset
    return bool(
        (offset.dtype == nbytes.dtype == there.dtype == remote.nbytes.dtype == _U64)
        and (region.dtype == remote.region.dtype == _U32)
        and (offset.ndim == nbytes.ndim == there.ndim == remote.nbytes.ndim == 1)
        and (region.ndim == remote.region.ndim == 1)
    )


def check_pairs(local: Spans, remote: Spans) -> None:
    """Check that there are equally many spans, in pairs of equal size. Raises SpanError."""
    if len(local) != len(remote):
        raise SpanError(
            min(len(local), len(remote)), f"{len(local)} local spans, but {len(remote)} remote ones"
        )
    if not len(local):
        raise SpanError(0, "a batch needs at least one span")
    differ = local.nbytes != remote.nbytes
    if differ.any():
        at = int(differ.argmax())
        raise SpanError(at, f"{int(local.nbytes[at])} bytes local, but {int(remote.nbytes[at])} remote")


def check_bounds(spans: Spans, region_id: int, region_nbytes: int, where: Index) -> None:
    """Check that ``spans[where]`` are inside a region of ``region_nbytes``. No sum overflows."""
    whole = len(where) == len(spans)
    if whole:
        # Usually even the longest span would fit at the highest offset. This check is much faster.
        longest, last = int(spans.nbytes.max()), int(spans.offset.max())
        if spans.nbytes.min() > 0 and last + longest <= region_nbytes:
            return
    offset = spans.offset if whole else spans.offset[where]
    nbytes = spans.nbytes if whole else spans.nbytes[where]
    size = np.uint64(region_nbytes)
    # The size of an empty span wraps around, so it is found too.
    bad = (nbytes - np.uint64(1) >= size) | (offset > size - np.minimum(nbytes, size))
    if bad.any():
        at = int(where[int(bad.argmax())])
        start, length = int(spans.offset[at]), int(spans.nbytes[at])
        if length == 0:
            raise SpanError(at, "zero bytes")
        raise SpanError(
            at, f"bytes {start} to {start + length} are outside region {region_id} of {region_nbytes} bytes"
        )


def check_disjoint(spans: Spans) -> None:
    """Check that destination spans do not overlap. Raises SpanError."""
    one_region = bool((spans.region == spans.region[0]).all())
    if one_region and bool((spans.offset[1:] >= spans.offset[:-1] + spans.nbytes[:-1]).all()):
        return
    order = spans.offset.argsort() if one_region else np.lexsort((spans.offset, spans.region))
    region, offset, nbytes = spans.region[order], spans.offset[order], spans.nbytes[order]
    overlaps = (region[1:] == region[:-1]) & (offset[:-1] + nbytes[:-1] > offset[1:])
    if overlaps.any():
        at = int(overlaps.argmax())
        first, second = sorted((int(order[at]), int(order[at + 1])))
        raise SpanError(second, f"overlaps span {first} of the same destination")
