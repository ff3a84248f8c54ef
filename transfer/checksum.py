"""The checksum of a span: xxh3-64, one seedless number for the same bytes on every host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import xxhash

from transfer.span import Spans

if TYPE_CHECKING:
    from typing_extensions import Buffer


def checksum(buffer: Buffer) -> int:
    """xxh3-64 of ``buffer``'s bytes. Releases the GIL; reads at memory speed."""
    return xxhash.xxh3_64_intdigest(buffer)


def checksums(spans: Spans, buffer: Callable[[int], memoryview]) -> list[int]:
    """Of each span's bytes; ``buffer`` gives the bytes of a region. The spans must be within bounds."""
    digest = xxhash.xxh3_64_intdigest
    begins = spans.offset.tolist()
    ends = (spans.offset + spans.nbytes).tolist()
    regions = spans.region.tolist()
    if regions.count(regions[0]) == len(regions):
        view = buffer(regions[0])
        return [digest(view[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    return [
        digest(buffer(region)[begin:end]) for region, begin, end in zip(regions, begins, ends, strict=True)
    ]
