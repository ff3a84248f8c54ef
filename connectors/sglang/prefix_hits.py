"""How much of a prefix can be restored, by which pages of each pool are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        own = [length for length in range(1, num_pages + 1) if _is_complete(hits, length)]
        longest[name] = own[-1] if own else 0
        lengths = [length for length in lengths if length in set(own)]
    return lengths, longest


def _is_complete(hits: PoolHits, length: int) -> bool:
    first = max(0, length - hits.num_trailing) if hits.num_trailing else 0
    return all(hits.is_here[first:length])
