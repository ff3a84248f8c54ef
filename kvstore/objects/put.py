"""A put of one object: room is reserved window by window, and the object is visible after its last byte."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.grants.table import Grant, Slot
from moonpool.kvstore.objects.chunks import RUN_CHUNKS, ChunkPlan
from moonpool.kvstore.objects.errors import BadRequest, PutBroken
from moonpool.kvstore.store import Reservation, TieredStore
from moonpool.protos import store_pb2
from moonpool.transfer import WriteGrant, checksum

_WINDOW_CHUNKS = 4 * RUN_CHUNKS


def window_chunks(store: TieredStore) -> int:
    """Most chunks reserved or leased at a time: enough to amortise a round trip, few enough that one put or
    get does not take all memory."""
    return max(min(_WINDOW_CHUNKS, store.host.capacity // 4), 1)


class Put:
    """After ``reserve`` the caller fills ``offsets``, then calls ``commit``, and so on until ``complete``.

    ``abort`` gives back what is reserved.
    """

    def __init__(self, store: TieredStore, record: store_pb2.StoredObject) -> None:
        """``record.tail_checksum`` is set when the last chunk is committed."""
        self.record = record
        self.grant: Grant | None = None
        """Of the reserved slots, to the client; renewed with each window. None for a copy of our own."""
        self.writable: WriteGrant | None = None
        """What lets another process write the reserved slots."""
        self._store = store
        self._window = window_chunks(store)
        self._cut = ChunkPlan.of(record.info, record.chunk_nbytes)
        self._reserved: list[Reservation] = []
        self._first = 0  # of the chunks reserved now
        self._next = 0  # the first chunk not yet reserved

    @property
    def complete(self) -> bool:
        return not self._reserved and self._next == self._cut.num_chunks

    @property
    def offsets(self) -> list[int]:
        """Offsets in the store's memory of the reserved chunks, in bytes, in order."""
        return [offset for reservation in self._reserved for offset in reservation.offsets]

    @property
    def slots(self) -> list[Slot]:
        """The reserved slots."""
        return [(Tier.HOST, slot) for reservation in self._reserved for slot in reservation.slots]

    def reserve(self) -> bool:
        """Reserve the next window, or as much as there is room for. False: there is none. Raises
        ``PutBroken``: the same version is being written by another put."""
        cut, self._first = self._cut, self._next
        end = min(self._next + self._window, cut.num_chunks)
        while self._next < end:
            run = cut.run_of(self._next)
            at = self._next - run.first
            wanted = run.keys[at : at + end - self._next]
            reservation = self._store.reserve(wanted, parent=run.keys[at - 1] if at else None)
            if reservation.num_held:
                reservation.abort()
                raise PutBroken("another put of this version is running, or has just ended")
            num_slots = len(reservation.slots)
            if num_slots == 0:
                reservation.abort()
                break
            self._reserved.append(reservation)
            self._next += num_slots
            if num_slots < len(wanted):
                break
        return self._next > self._first

    def commit(self, checksums: Sequence[int]) -> None:
        """The reserved chunks hold their bytes, with these xxh3-64. Raises ``BadRequest``: there are not as
        many as chunks reserved; nothing has changed."""
        if len(checksums) != self._next - self._first:
            raise BadRequest(f"{self._next - self._first} chunks were reserved, {len(checksums)} committed")
        values = list(checksums)
        if self._next == self._cut.num_chunks and values:
            self.record.tail_checksum = values[-1]
            values[-1] = self._fill_tail(values[-1])
        reserved, self._reserved = self._reserved, []
        at = 0
        for reservation in reserved:
            num_slots = len(reservation.slots)
            reservation.commit(values[at : at + num_slots])
            at += num_slots

    def _fill_tail(self, known: int) -> int:
        """Zero the rest of the last chunk's slot; returns the checksum of the whole slot."""
        slot = self._reserved[-1].spans[-1]
        nbytes = self._cut.nbytes_of(self._cut.num_chunks - 1)
        if nbytes == slot.nbytes:
            return known
        slot[nbytes:] = 0
        return checksum(slot.data)

    def abort(self) -> ChunkPlan:
        """Give back what is reserved, once no write can land in it any more. Returns the plan of the chunks
        that the caller removes."""
        reserved, self._reserved = self._reserved, []

        def give_back() -> None:
            for reservation in reserved:
                reservation.abort()

        if self.writable is None:
            give_back()
        else:
            self.writable.revoke(give_back)
        return self._cut
