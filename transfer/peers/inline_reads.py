"""Reads of few and small spans that are done before ``Peer.read`` returns."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from moonpool.transfer.copying.pool import INLINE_ROWS
from moonpool.transfer.memory.span import Spans
from moonpool.transfer.peers.batch import DoneBatch, LoopTurn, moved
from moonpool.transfer.peers.failover import PeerRoute


class InlineReads:
    """Of one peer. They end like other batches, with the same checks, metrics and bandwidths.

    A read that is large, or in which anything is unusual, is left to a batch: so each error has one place
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
        num_spans = len(local.region)
        path = self._route.paths.first()
        if path is None or not 0 < num_spans <= INLINE_ROWS or len(remote.region) != num_spans:
            return None
        region = self._route.regions.find(local.region.item(0))
        if region is None or not region.writable or region.device is not None:
            return None
        expected = b""
        if checksums is not None:
            try:
                expected = array("Q", checksums).tobytes()
            except (TypeError, OverflowError):
                return None
            if len(expected) != 8 * num_spans:
                return None
        nbytes = path.read_now(region, local, remote, expected if self._verify else b"")
        seconds = time.perf_counter() - began
        self._turn.spent_s += seconds
        if not nbytes or seconds > deadline_s:
            return None
        self._route.paths.succeeded(path, nbytes, seconds)
        return DoneBatch(moved("read", path.name, nbytes, num_spans, seconds), self._turn)
