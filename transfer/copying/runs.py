"""Spans that lie in runs, here and there: copied, checksummed as one, or both in one pass."""

from __future__ import annotations

import ctypes

import numpy as np
import xxhash

from moonpool.transfer.native.arrays import U32, U64
from moonpool.transfer.native.compiled_copy import NEVER, SHORT_NBYTES, STRIPE_NBYTES, Stop, mover


def move_runs(
    to: U64 | None, source: U64, nbytes: U64, counts: U32, *, stop: Stop = NEVER, digests: U64 | None = None
) -> bool:
    """Copy ``nbytes[i]`` from address ``source[i]`` to ``to[i]``, all of which must be mapped; without ``to``
    only look at them. False when it was stopped on the way.

    to, source, nbytes: uint64 [rows]; counts: uint32 [spans], how many rows in turn are each span's.
    digests: uint64 [spans], takes the checksum of each span. Releases the GIL unless it is little.
    """
    compiled = mover()
    if compiled is not None and (digests is None or _in_stripes(nbytes, counts)):
        return compiled.move(to, source, nbytes, stop=stop, digests=digests, counts=counts)
    rows = zip(source.tolist() if to is None else to.tolist(), source.tolist(), nbytes.tolist(), strict=True)
    for span, count in enumerate(counts.tolist()):
        if stop[0]:
            return False
        digest = xxhash.xxh3_64()
        for _ in range(count):
            here, there, size = next(rows)
            if to is not None:
                ctypes.memmove(here, there, size)
            digest.update((ctypes.c_char * size).from_address(here))
        if digests is not None:
            digests[span] = digest.intdigest()
    return True


def _in_stripes(nbytes: U64, counts: U32) -> bool:
    """Whether the compiled code can checksum these: only the last run of a span may end within a stripe."""
    ends = np.cumsum(counts, dtype=np.intp)
    wholes = np.add.reduceat(nbytes, ends - counts)
    if wholes.min() <= SHORT_NBYTES or nbytes.min() < STRIPE_NBYTES:
        return False
    return not (np.delete(nbytes, ends - 1) % np.uint64(STRIPE_NBYTES)).any()
