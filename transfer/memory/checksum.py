"""The checksum of a span: xxh3-64 without a seed, so equal bytes have equal checksums on every host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from moonpool.transfer.errors import ChecksumMismatch
from moonpool.transfer.native.arrays import U64, Index
from moonpool.transfer.native.compiled_copy import SHORT_NBYTES, compiled_copy

if TYPE_CHECKING:
    from typing_extensions import Buffer


Checksums = Callable[[U64, U64], U64]
"""Checksums of (offsets, nbytes) of one region, all uint64 [n]."""


def checksum(buffer: Buffer) -> int:
    """xxh3-64 of ``buffer``'s bytes. Releases the GIL; runs at memory speed."""
    return xxhash.xxh3_64_intdigest(buffer)


def checksums(addresses: U64, nbytes: U64) -> U64:
    """Checksums of ``nbytes[i]`` bytes at ``addresses[i]``, which must be mapped: uint64 [n]."""
    digests = np.empty(len(nbytes), np.uint64)
    compiled = compiled_copy()
    if compiled is not None:
        compiled.move(None, addresses, nbytes, digests=digests)
    fill_rest(digests, addresses, nbytes, SHORT_NBYTES if compiled else None)
    return digests


def fill_rest(digests: U64, addresses: U64, nbytes: U64, most_nbytes: int | None = SHORT_NBYTES) -> None:
    """Compute ``digests`` of the runs of at most ``most_nbytes``; None: of all runs."""
    rest = range(len(nbytes)) if most_nbytes is None else np.flatnonzero(nbytes <= most_nbytes).tolist()
    for index in rest:
        run = (ctypes.c_char * int(nbytes[index])).from_address(int(addresses[index]))
        digests[index] = xxhash.xxh3_64_intdigest(run)


def compare(spans: Index, expected: U64, found: U64) -> None:
    """Compare the checksums of span ``spans[k]``, for each k. Raises ChecksumMismatch."""
    differ = expected != found
    if differ.any():
        at = int(differ.argmax())
        raise ChecksumMismatch(int(spans[at]), int(expected[at]), int(found[at]))
