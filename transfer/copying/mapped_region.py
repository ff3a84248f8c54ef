"""Reads from a peer's region that is mapped here, without waiting: one native call on the caller's thread."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from moonpool.transfer.connections.handshake import Identity
from moonpool.transfer.copying.peer_memory import Witness
from moonpool.transfer.copying.pool import INLINE_NBYTES
from moonpool.transfer.memory.lifeline import lifeline_parts
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.span import Spans, plain_columns
from moonpool.transfer.native.arrays import address_of
from moonpool.transfer.native.compiled_copy import CompiledCopy

# `Source` of `read_now.cpp`.
_SOURCE = struct.Struct("@P16sQQIIi")


class MappedRegion:
    """One region of a peer. It keeps the map, and must be dropped when the peer closes the region."""

    def __init__(
        self,
        compiled: CompiledCopy,
        region_id: int,
        array: npt.NDArray[np.uint8],
        nbytes: int,
        peer: Identity,
        witness: Witness,
    ) -> None:
        """array: the map; only its first ``nbytes`` are the region's. witness: of ``peer``."""
        self._read = compiled.read_now
        # Must live as long as their addresses are used.
        self._array = array
        _, (slot, _) = lifeline_parts([region_id])
        self._lifeline = witness.lifeline
        self.source = _SOURCE.pack(
            *(address_of(witness.lifeline), peer.incarnation),
            *(address_of(array), min(nbytes, len(array)), region_id, slot, witness.pidfd),
        )

    def read(self, region: Region, local: Spans, remote: Spans, checksums: bytes) -> int:
        """Copy ``remote``, of this region, to ``local``, of ``region``: writable host memory.

        checksums: uint64 [n], to verify; empty: do not. Returns the number of bytes. 0: the spans are wrong,
        or more than is copied at once, the bytes do not match, or the owner has closed the region or died.
        The local bytes are undefined then, and a batch finds out which it is.
        """
        num_spans = len(local.region)
        if not plain_columns(local, remote):
            return 0
        columns = b"".join(
            (
                *(local.offset.tobytes(), local.nbytes.tobytes(), remote.offset.tobytes()),
                *(remote.nbytes.tobytes(), checksums, local.region.tobytes(), remote.region.tobytes()),
            )
        )
        if len(columns) != (48 if checksums else 40) * num_spans:
            return 0
        return self._read(
            *(self.source, region.id, region.address, region.nbytes),
            *(num_spans, columns, bool(checksums), INLINE_NBYTES),
        )
