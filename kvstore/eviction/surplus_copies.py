"""Blocks that go first: unused copies made because a prefix was in demand, and what clients released."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# A copy not used for this long is evicted first.
UNUSED_S = 10.0


def unshared_end(chain: Sequence[Key], is_shared: Callable[[Key, Key | None], bool]) -> list[Key]:
    """The end of ``chain`` that belongs to no other chain, in order. ``is_shared(key, successor)``: whether a
    chain goes on after ``key`` otherwise than with ``successor``."""
    successor: Key | None = None
    end: list[Key] = []
    for key in reversed(chain):
        if is_shared(key, successor):
            break
        end.append(key)
        successor = key
    end.reverse()
    return end


class SurplusCopies(Generic[Key]):
    """The surplus copies of one tier and when each was last used. False if there are none."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
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

    def drop(self, chain: Iterable[Key]) -> None:
        """Have these blocks, in chain order, evicted before all others, unless a request uses them again."""
        for key in chain:
            self._used_s[key] = -math.inf
            # In front of those before it: the end of a chain is evicted first.
            self._used_s.move_to_end(key, last=False)

    def use(self, chain: Iterable[Key]) -> None:
        """A request uses these blocks: what was released is as any other block again. Others are ignored."""
        known = {key: self._used_s[key] for key in chain if key in self._used_s}
        for key, used_s in known.items():
            if used_s == -math.inf:
                self.forget(key)
        self.mark(key for key in known if key in self._used_s)

    def forget(self, key: Key) -> None:
        """The tier does not have the block any more. Idempotent."""
        self._used_s.pop(key, None)

    def unused(self) -> Iterator[Key]:
        """Iterate over copies not used lately, the least recently used first. Stop before any change."""
        before_s = self._clock() - UNUSED_S
        for key, used_s in self._used_s.items():
            if used_s > before_s:
                return
            yield key
