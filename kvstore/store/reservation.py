"""Reserved host memory for a run of blocks that are still to be filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from xxhash import xxh3_64_intdigest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.store.residency import Residency
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.protocols import Bytes


class Reservation:
    """``slots[i]`` is for ``keys[num_held + i]``; the first ``num_held`` keys are held already. There are
    fewer slots than keys where there is no room, and none if ``parent`` is not held.

    Fill ``spans``, then ``commit``: only then are the blocks visible. After ``abort``, or leaving ``with``
    without a commit, nothing has happened. It may stay open for any time, and keeps its slots meanwhile.
    """

    def __init__(self, residency: Residency, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        self.num_held = len(residency.match(keys))
        self.slots: list[int] = []
        self._residency = residency
        self._host = residency.host
        self._keys = keys
        self._before = keys[self.num_held - 1] if self.num_held else parent
        self._above: list[int] = []  # pinned, so that the chain is not evicted to make room for its own end
        self._open = True
        if self._before is None or residency.is_held(self._before):
            self._take()

    def _take(self) -> None:
        before = self._before
        self._above = [] if before is None else self._host.lineage(before)
        self._host.pin(self._above)
        for key in self._keys[self.num_held :]:
            slot = self._host.reserve(key, before)
            if slot is None:
                metrics.REFUSED_BLOCKS.inc()
                return
            self.slots.append(slot)
            before = key

    @property
    def spans(self) -> list[Bytes]:
        """uint8 [block_nbytes] each, to be filled."""
        return [self._host.bytes_of(slot) for slot in self.slots]

    @property
    def offsets(self) -> list[int]:
        """Offsets of the slots in the store's memory, in bytes."""
        return [self._host.offset_of(slot) for slot in self.slots]

    def commit(self, checksums: Sequence[int] | None = None) -> int:
        """The slots are filled; ``checksums``: xxh3-64, None: computed here. Returns how many of the first
        ``keys`` are held now: none if the block before them was dropped meanwhile."""
        assert self._open, "a reservation is committed once"
        before = self._before
        if before is not None and not self._residency.is_held(before):
            self.abort()
            return 0
        self._open = False
        keys = self._keys[self.num_held : self.num_held + len(self.slots)]
        for i, (key, slot) in enumerate(zip(keys, self.slots, strict=True)):
            value = xxh3_64_intdigest(self._host.bytes_of(slot).data) if checksums is None else checksums[i]
            self._host.fill(slot, key, before, value)
            before = key
        for key in keys:
            self._residency.stored(key)
        self._host.unpin(self._above)
        return self.num_held + len(keys)

    def abort(self) -> None:
        """Give the slots back. Idempotent; no effect after ``commit``."""
        if self._open:
            self._open = False
            for slot in self.slots:
                self._host.abandon(slot)
            self._host.unpin(self._above)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
