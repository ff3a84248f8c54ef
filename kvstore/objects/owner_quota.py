"""How much of a store node each tenant's objects may take, and which of its own go when it is too much."""

from __future__ import annotations

from collections import OrderedDict

from moonpool.kvstore.objects.errors import OverQuota


class ObjectQuotas:
    """Bookkeeping only: the shelf says what comes, is used and goes, and drops what it is told."""

    def __init__(self, limit_nbytes: int) -> None:
        """``limit_nbytes``: for each owner; 0: no bound."""
        self.limit_nbytes = limit_nbytes
        self._held: dict[bytes, OrderedDict[bytes, int]] = {}  # by owner: bytes by key, longest unused first

    def nbytes(self, owner: bytes) -> int:
        return sum(self._held.get(owner, {}).values())

    def shown(self, owner: bytes, key: bytes, nbytes: int) -> None:
        """The owner has this object now, which takes so many bytes here."""
        self._held.setdefault(owner, OrderedDict())[key] = nbytes

    def used(self, owner: bytes, key: bytes) -> None:
        self._held[owner].move_to_end(key)

    def gone(self, owner: bytes, key: bytes) -> None:
        held = self._held[owner]
        del held[key]
        if not held:
            del self._held[owner]

    def victims(self, owner: bytes, key: bytes, nbytes: int, under_way_nbytes: int) -> list[bytes]:
        """What of its own the owner must give up, longest unused first, to put ``nbytes`` under ``key`` in
        place of what is there, while its other puts bring ``under_way_nbytes``.

        Raises ``OverQuota``: it is too much even for all that it has.
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
