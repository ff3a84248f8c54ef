"""Reads and writes of few and small spans that are done before ``Peer.read`` or ``write`` returns."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from moonpool.transfer.copying.batch_request import Direction
from moonpool.transfer.copying.pool import INLINE_NBYTES, INLINE_ROWS
from moonpool.transfer.errors import SpanError
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.span import Spans, check_disjoint, plain_columns
from moonpool.transfer.paths.base import Path
from moonpool.transfer.peers.batch import DoneBatch, LoopTurn, moved
from moonpool.transfer.peers.failover import PeerRoute


class InlineBatches:
    """Of one peer. They end like other batches, with the same checks, metrics and bandwidths.

    One that is large, or in which anything is unusual, is left to a batch: so each error has one place
    that finds it. What a batch needs once, such as the peer's answer about a region, is done by the first.
    """

    def __init__(self, route: PeerRoute, turn: LoopTurn, *, verify: bool) -> None:
        self._route = route
        self._turn = turn
        self._verify = verify

    def read(
        self, local: Spans, remote: Spans, deadline_s: float, checksums: Sequence[int] | None
    ) -> DoneBatch | None:
        """The batch, which is done; None: post it. The local bytes are undefined then."""
        began = time.perf_counter()
        path, region = self._route.paths.first(), self._region(local, remote)
        expected = self._expected(checksums, len(local.region))
        if path is None or region is None or not region.writable or expected is None:
            return None
        nbytes = path.read_now(region, local, remote, expected)
        return self._done("read", path, nbytes, len(local.region), began, deadline_s)

    def write(
        self,
        local: Spans,
        remote: Spans,
        deadline_s: float,
        checksums: Sequence[int] | None,
        grant: int,
        unfinished: list[int],
    ) -> DoneBatch | None:
        """The batch, which is done; None: post it. ``unfinished`` receives the numbers of connections from
        which the peer may still take bytes then."""
        began = time.perf_counter()
        path, region = self._route.paths.first(), self._region(local, remote)
        expected = self._expected(checksums, len(local.region))
        if path is None or region is None or expected is None or not plain_columns(local, remote):
            return None
        # All else is checked by the peer.
        if local.nbytes.tobytes() != remote.nbytes.tobytes() or sum(local.nbytes.tolist()) > INLINE_NBYTES:
            return None
        if len(remote.region) > 1:
            if set(local.region.tolist()) != {region.id}:
                return None
            try:
                check_disjoint(remote)
            except SpanError:
                return None
        of_local_bytes = checksums is None and self._verify and path.networked
        written = path.write_now(region, local, remote, None if of_local_bytes else expected, grant)
        unfinished += written.unfinished
        return self._done("write", path, written.nbytes, len(local.region), began, deadline_s)

    def _region(self, local: Spans, remote: Spans) -> Region | None:
        """Of the first local span, if it is host memory and the spans are few."""
        if not 0 < len(local.region) <= INLINE_ROWS or len(remote.region) != len(local.region):
            return None
        region = self._route.regions.find(local.region.item(0))
        return None if region is None or region.device is not None else region

    def _expected(self, checksums: Sequence[int] | None, num_spans: int) -> bytes | None:
        """The checksums to verify, uint64 [n]; empty: none. None: they are wrong."""
        if checksums is None:
            return b""
        try:
            expected = array("Q", checksums).tobytes()
        except (TypeError, OverflowError):
            return None
        if len(expected) != 8 * num_spans:
            return None
        return expected if self._verify else b""

    def _done(
        self, direction: Direction, path: Path, nbytes: int, num_spans: int, began: float, deadline_s: float
    ) -> DoneBatch | None:
        seconds = time.perf_counter() - began
        self._turn.spent_s += seconds
        if not nbytes or seconds > deadline_s:
            return None
        self._route.paths.succeeded(path, nbytes, seconds)
        return DoneBatch(moved(direction, path.name, nbytes, num_spans, seconds), self._turn)
