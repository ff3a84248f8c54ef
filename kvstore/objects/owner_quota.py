"""The order in which a store node gives up objects, for room or for a tenant's limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from moonpool.kvstore.objects.chunks import is_small
from moonpool.kvstore.objects.errors import OverQuota
from moonpool.protos import store_pb2


class ObjectQuotas:
    """Bookkeeping only: the shelf reports changes, and drops what it is told. Least recently used objects go
    first, soft pins after all others, hard pins never."""

    def __init__(self, limit_nbytes: int) -> None:
        """``limit_nbytes``: for each owner; 0: no limit."""
        self.limit_nbytes = limit_nbytes
        # Least recently used first, with the bytes each takes.
        self._held: OrderedDict[int, tuple[store_pb2.StoredObject, int]] = OrderedDict()
        self._of_owner: dict[bytes, OrderedDict[int, int]] = {}
        self.chunks_nbytes = self.small_nbytes = 0  # taken now
        self._pinned: dict[int, int] = {}
        self.pinned_nbytes = 0

    def nbytes(self, owner: bytes) -> int:
        return sum(self._of_owner.get(owner, {}).values())

    def shown(self, record: store_pb2.StoredObject, nbytes: int) -> None:
        storage = record.info.storage
        self._held[storage] = (record, nbytes)
        self._of_owner.setdefault(record.owner, OrderedDict())[storage] = nbytes
        self._count(record, nbytes)
        self.pinned(record)

    def pinned(self, record: store_pb2.StoredObject) -> None:
        """A record was published that may pin the object."""
        storage = record.info.storage
        if record.record.pin != store_pb2.NONE and storage not in self._pinned:
            self._pinned[storage] = self._held[storage][1]
            self.pinned_nbytes += self._pinned[storage]

    def used(self, record: store_pb2.StoredObject) -> None:
        self._held.move_to_end(record.info.storage)
        self._of_owner[record.owner].move_to_end(record.info.storage)

    def gone(self, record: store_pb2.StoredObject) -> None:
        storage = record.info.storage
        _, nbytes = self._held.pop(storage)
        self._count(record, -nbytes)
        self.pinned_nbytes -= self._pinned.pop(storage, 0)
        held = self._of_owner[record.owner]
        del held[storage]
        if not held:
            del self._of_owner[record.owner]

    def _count(self, record: store_pb2.StoredObject, nbytes: int) -> None:
        if is_small(record.info):
            self.small_nbytes += nbytes
        else:
            self.chunks_nbytes += nbytes

    def victims(
        self, owner: bytes, key: bytes, nbytes: int, under_way_nbytes: int
    ) -> list[store_pb2.StoredObject]:
        """The owner's objects to drop before ``nbytes`` are put under ``key``; its former value goes
        anyway, while its other puts bring ``under_way_nbytes``.

        Raises ``OverQuota``: dropping all that may be dropped is not enough.
        """
        if not self.limit_nbytes:
            return []
        wanted = nbytes + under_way_nbytes
        held = [self._held[storage] for storage in self._of_owner.get(owner, ())]
        others = [(record, size) for record, size in held if record.info.key != key]
        excess = sum(size for _, size in others) + wanted - self.limit_nbytes
        found, freed_nbytes = _first(others, excess)
        if freed_nbytes < excess:
            raise OverQuota(wanted, self.limit_nbytes)
        return found

    def for_room(self, nbytes: int, *, small: bool) -> list[store_pb2.StoredObject]:
        """Objects to drop so that ``nbytes`` are free, or all that may be dropped: small ones, or those in
        chunks."""
        return _first((each for each in self._held.values() if is_small(each[0].info) == small), nbytes)[0]


def _first(
    objects: Iterable[tuple[store_pb2.StoredObject, int]], nbytes: int
) -> tuple[list[store_pb2.StoredObject], int]:
    """The first that bring ``nbytes`` together, and what they bring."""
    found: list[store_pb2.StoredObject] = []
    freed_nbytes = 0
    soft: list[tuple[store_pb2.StoredObject, int]] = []

    def take(some: Iterable[tuple[store_pb2.StoredObject, int]], later: bool) -> None:
        nonlocal freed_nbytes
        for record, size in some:
            if freed_nbytes >= nbytes:
                return
            pin = record.record.pin
            if later and pin == store_pb2.SOFT:
                soft.append((record, size))
            elif pin != store_pb2.HARD and size:
                found.append(record)
                freed_nbytes += size

    take(objects, later=True)
    take(soft, later=False)
    return found, freed_nbytes
