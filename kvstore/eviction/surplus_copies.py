"""Copies that were made because a prefix was in demand: the first to go when nobody asks for them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# A copy is no longer needed when nobody has used it for so long.
UNUSED_S = 10.0


class SurplusCopies(Generic[Key]):
    """Which blocks of one tier are such copies, and when each was last used. False while there are none."""

    def __init__(self, *, unused_s: float = UNUSED_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._cold_s = unused_s
        self._clock = clock
        self._used_s: OrderedDict[Key, float] = OrderedDict()  # unused for longest first

    def __len__(self) -> int:
        return len(self._used_s)

    def __contains__(self, key: object) -> bool:
        return key in self._used_s

    def mark(self, chain: Iterable[Key]) -> None:
        """These blocks are copies, in order of their chain, and have just come."""
        # From the last to the first: of a chain, the end goes first.
        for key in reversed(list(chain)):
            self._used_s[key] = self._clock()
            self._used_s.move_to_end(key)

    def use(self, chain: Iterable[Key]) -> None:
        """A request uses these blocks; those that are no copies are passed over."""
        self.mark(key for key in chain if key in self._used_s)

    def forget(self, key: Key) -> None:
        """The tier holds the block no more. Idempotent."""
        self._used_s.pop(key, None)

    def unused(self) -> Iterator[Key]:
        """Copies nobody has used lately, the one unused for longest first. Stop before anything changes."""
        before_s = self._clock() - self._cold_s
        for key, used_s in self._used_s.items():
            if used_s > before_s:
                return
            yield key
