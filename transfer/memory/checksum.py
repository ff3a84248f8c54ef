"""The checksum of a span: xxh3-64, one seedless number for the same bytes on every host."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from moonpool.transfer.native.arrays import U64
from moonpool.transfer.native.compiled_copy import SHORT_NBYTES, mover

if TYPE_CHECKING:
    from typing_extensions import Buffer


def checksum(buffer: Buffer) -> int:
    """xxh3-64 of ``buffer``'s bytes. Releases the GIL; reads at memory speed."""
    return xxhash.xxh3_64_intdigest(buffer)


def checksums(addresses: U64, nbytes: U64) -> U64:
    """Of ``nbytes[i]`` bytes at each of ``addresses``, which must be mapped: uint64 [n]."""
    digests = np.empty(len(nbytes), np.uint64)
    compiled = mover()
    if compiled is not None:
        compiled.move(None, addresses, nbytes, digests=digests)
    fill_rest(digests, addresses, nbytes, SHORT_NBYTES if compiled else None)
    return digests


def fill_rest(digests: U64, addresses: U64, nbytes: U64, most_nbytes: int | None = SHORT_NBYTES) -> None:
    """``digests`` of the runs of up to ``most_nbytes``, None: of all."""
    rest = range(len(nbytes)) if most_nbytes is None else np.flatnonzero(nbytes <= most_nbytes).tolist()
    for index in rest:
        run = (ctypes.c_char * int(nbytes[index])).from_address(int(addresses[index]))
        digests[index] = xxhash.xxh3_64_intdigest(run)
