"""Whether loading a prefix is faster than computing it, by what both took lately."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

# How much one observation moves an estimate.
_GAIN = 0.3
# Steps of fewer prompt tokens are dominated by what does not depend on them.
_MIN_TOKENS = 32
# A source that was too slow is tried again after this time: only loads tell what they cost.
_FORGET_S = 60.0


class Source(NamedTuple):
    """What a load reads from: memory or disk of a node."""

    node_id: str
    from_disk: bool


class LoadCosts:
    """Until both costs are known, a load is worth it: that is how they become known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._compute_s = 0.0  # a prompt token
        self._load_s: dict[Source, tuple[float, float]] = {}  # a block; when that was seen

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of ``num_tokens`` prompt tokens took ``seconds``."""
        if num_tokens >= _MIN_TOKENS and seconds > 0:
            self._compute_s = _moved(self._compute_s, seconds / num_tokens)

    def loaded(self, source: Source, num_blocks: int, seconds: float) -> None:
        """A load from ``source`` took ``seconds``, its wait in queues included."""
        before = self._of(source)
        # Names of nodes that are gone are few, and forgotten with the others.
        self._load_s = {each: known for each, known in self._load_s.items() if self._is_fresh(known)}
        self._load_s[source] = _moved(before, seconds / num_blocks), self._clock()

    def is_worth(self, source: Source, num_blocks: int, num_tokens: int) -> bool:
        load_s = self._of(source)
        return not load_s or not self._compute_s or load_s * num_blocks < self._compute_s * num_tokens

    def _of(self, source: Source) -> float:
        known = self._load_s.get(source)
        return known[0] if known is not None and self._is_fresh(known) else 0.0

    def _is_fresh(self, known: tuple[float, float]) -> bool:
        return self._clock() - known[1] < _FORGET_S


def _moved(old: float, seen: float) -> float:
    return seen if not old else old + _GAIN * (seen - old)
