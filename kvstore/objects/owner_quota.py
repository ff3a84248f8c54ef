"""Limits on each tenant's objects on a store node, and the choice of its objects that exceed the limit."""

from __future__ import annotations

from collections import OrderedDict

from moonpool.kvstore.objects.errors import OverQuota


class ObjectQuotas:
    """Bookkeeping only: the shelf reports changes, and drops what it is told."""

    def __init__(self, limit_nbytes: int) -> None:
        """``limit_nbytes``: for each owner; 0: no limit."""
        self.limit_nbytes = limit_nbytes
        self._held: dict[bytes, OrderedDict[bytes, int]] = {}  # by owner; least recently used first

    def nbytes(self, owner: bytes) -> int:
        return sum(self._held.get(owner, {}).values())

    def shown(self, owner: bytes, key: bytes, nbytes: int) -> None:
        self._held.setdefault(owner, OrderedDict())[key] = nbytes

    def used(self, owner: bytes, key: bytes) -> None:
        self._held[owner].move_to_end(key)

    def gone(self, owner: bytes, key: bytes) -> None:
        held = self._held[owner]
        del held[key]
        if not held:
            del self._held[owner]

    def victims(self, owner: bytes, key: bytes, nbytes: int, under_way_nbytes: int) -> list[bytes]:
        """The owner's objects to drop, least recently used first, before ``nbytes`` are put under ``key``
        while its other puts bring ``under_way_nbytes``.

        Raises ``OverQuota``: dropping all of them is not enough.
        """
        if not self.limit_nbytes:
            return []
        if nbytes + under_way_nbytes > self.limit_nbytes:
            raise OverQuota(nbytes + under_way_nbytes, self.limit_nbytes)
        others = [(each, size) for each, size in self._held.get(owner, {}).items() if each != key]
        excess = sum(size for _, size in others) + nbytes + under_way_nbytes - self.limit_nbytes
        found = []
        for each, size in others:
            if excess <= 0:
                break
            found.append(each)
            excess -= size
        return found
