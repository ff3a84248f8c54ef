"""Whether loading a prefix is faster than computing it, by what both took lately."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median_low
from typing import NamedTuple

# How much one observation moves the estimate of computing.
_GAIN = 0.3
# Of a source: the median of so many loads, so that one that waited for a connection or a stalled node counts
# little. From the second on: the first connects.
_LOADS, _LEAST_LOADS = 5, 2
# Steps of fewer prompt tokens are dominated by what does not depend on them.
_MIN_TOKENS = 32
# A source that was too slow is tried again after this time: only loads tell what they cost.
_FORGET_S = 60.0


class Source(NamedTuple):
    """What a load reads from: memory or disk of a node."""

    node_id: str
    from_disk: bool


class _Loads(NamedTuple):
    """The latest of one source: seconds a block, and when the last was seen."""

    block_s: tuple[float, ...]
    seen_s: float


class LoadCosts:
    """Until both costs are known, a load is worth it: that is how they become known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._compute_s = 0.0  # a prompt token
        self._loads: dict[Source, _Loads] = {}

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of ``num_tokens`` prompt tokens took ``seconds``."""
        if num_tokens >= _MIN_TOKENS and seconds > 0:
            self._compute_s = _moved(self._compute_s, seconds / num_tokens)

    def loaded(self, source: Source, num_blocks: int, seconds: float) -> None:
        """A load from ``source`` took ``seconds``, its wait in queues included."""
        # Names of nodes that are gone are few, and forgotten with the others.
        self._loads = {each: loads for each, loads in self._loads.items() if self._is_fresh(loads)}
        before = self._loads[source].block_s if source in self._loads else ()
        self._loads[source] = _Loads((*before, seconds / num_blocks)[-_LOADS:], self._clock())

    def is_worth(self, source: Source, num_blocks: int, num_tokens: int) -> bool:
        load_s = self._of(source)
        return not load_s or not self._compute_s or load_s * num_blocks < self._compute_s * num_tokens

    def _of(self, source: Source) -> float:
        loads = self._loads.get(source)
        if loads is None or len(loads.block_s) < _LEAST_LOADS or not self._is_fresh(loads):
            return 0.0
        return median_low(loads.block_s)

    def _is_fresh(self, loads: _Loads) -> bool:
        return self._clock() - loads.seen_s < _FORGET_S


def _moved(old: float, seen: float) -> float:
    return seen if not old else old + _GAIN * (seen - old)
