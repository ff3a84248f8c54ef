"""How much of a prefix can be restored, by which pages of each pool are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolHits:
    """``is_here``: the pages of the prefix, in order. ``num_trailing``: how many pages before the end of a
    prefix are needed; 0: all of them."""

    is_here: Sequence[bool]
    num_trailing: int = 0


def leading(is_here: Sequence[bool]) -> int:
    """How many pages there are before the first that is missing."""
    return next((at for at, each in enumerate(is_here) if not each), len(is_here))


def restorable(num_pages: int, pools: Mapping[str, PoolHits]) -> tuple[list[int], dict[str, int]]:
    """Return the lengths of the prefixes, at most ``num_pages``, of which every pool has what it needs, and
    the longest one of each pool alone."""
    lengths, longest = list(range(1, num_pages + 1)), dict[str, int]()
    for name, hits in pools.items():
        own = set(_complete(hits, num_pages))
        longest[name] = max(own, default=0)
        lengths = [length for length in lengths if length in own]
    return lengths, longest


def _complete(hits: PoolHits, num_pages: int) -> Iterator[int]:
    """The lengths of the prefixes, at most ``num_pages``, of which the pool has what it needs."""
    num_here = 0  # pages in a row up to this one
    for length in range(1, num_pages + 1):
        num_here = num_here + 1 if hits.is_here[length - 1] else 0
        if num_here >= min(length, hits.num_trailing or length):
            yield length
