"""Copies made because a prefix was in demand: evicted first once they are unused."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# A copy not used for this long is evicted first.
UNUSED_S = 10.0


class SurplusCopies(Generic[Key]):
    """The surplus copies of one tier and when each was last used. False if there are none."""

    def __init__(self, *, unused_s: float = UNUSED_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._cold_s = unused_s
        self._clock = clock
        self._used_s: OrderedDict[Key, float] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._used_s)

    def __contains__(self, key: object) -> bool:
        return key in self._used_s

    def mark(self, chain: Iterable[Key]) -> None:
        """Mark blocks, in chain order, as surplus copies that were just used."""
        # In reverse, so that the end of a chain is evicted first.
        for key in reversed(list(chain)):
            self._used_s[key] = self._clock()
            self._used_s.move_to_end(key)

    def use(self, chain: Iterable[Key]) -> None:
        """A request uses these blocks; blocks that are no copies are ignored."""
        self.mark(key for key in chain if key in self._used_s)

    def forget(self, key: Key) -> None:
        """The tier does not have the block any more. Idempotent."""
        self._used_s.pop(key, None)

    def unused(self) -> Iterator[Key]:
        """Iterate over copies not used lately, the least recently used first. Stop before any change."""
        before_s = self._clock() - self._cold_s
        for key, used_s in self._used_s.items():
            if used_s > before_s:
                return
            yield key
