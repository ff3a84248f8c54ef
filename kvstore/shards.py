"""Parts of KV blocks that ranks hold, and which bytes go where between nodes that cut them differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import LayoutError
from kvstore.layout import DTYPE_NBYTES, KVLayout


@dataclass(frozen=True, slots=True)
class BlockShard:
    """The layers and KV heads of every block that one rank holds: ``[layers, 2, heads, tokens, dim]``."""

    layers: range
    heads: range

    @classmethod
    def whole(cls, layout: KVLayout) -> BlockShard:
        return cls(range(layout.num_layers), range(layout.num_kv_heads))

    def block_nbytes(self, layout: KVLayout) -> int:
        return 2 * len(self.layers) * len(self.heads) * head_nbytes(layout)


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a block that are together on both sides; offsets are from the block's begin there."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """What a target reads of one source, for every block."""

    source: int  # its number among the sources
    runs: tuple[Run, ...]


def head_nbytes(layout: KVLayout) -> int:
    """K, or V, of one head of one layer: what no rank ever cuts."""
    return layout.block_size * layout.head_dim * DTYPE_NBYTES[layout.dtype]


def parts(layout: KVLayout, sources: Sequence[BlockShard], target: BlockShard, place: int = 0) -> list[Part]:
    """From which sources ``target`` gets its bytes, each byte once. ``layout``: of the whole block.

    Sources that hold the same are copies of each other, of which the one is read that ``place`` falls on, so
    that equal targets with different places spread over them.

    Raises LayoutError when the sources lack something.
    """
    copies: dict[BlockShard, list[int]] = {}
    for i, source in enumerate(sources):
        copies.setdefault(source, []).append(i)
    found: list[Part] = []
    num_cells = 0
    for source, numbers in copies.items():
        layers, heads = _common(source.layers, target.layers), _common(source.heads, target.heads)
        if layers and heads:
            num_cells += len(layers) * len(heads)
            runs = _runs(layout, source, target, layers, heads)
            found.append(Part(numbers[place % len(numbers)], tuple(runs)))
    if num_cells != len(target.layers) * len(target.heads):
        raise LayoutError(
            f"layers {_words(target.layers)}, KV heads {_words(target.heads)} are not held once each"
        )
    return found


def canonical_runs(layout: KVLayout, shards: Sequence[BlockShard]) -> list[tuple[int, Run]]:
    """The whole block, in the order of its bytes, as (shard, run into the whole block)."""
    runs = [
        (part.source, run) for part in parts(layout, shards, BlockShard.whole(layout)) for run in part.runs
    ]
    return sorted(runs, key=lambda entry: entry[1].target)


def _runs(layout: KVLayout, source: BlockShard, target: BlockShard, layers: range, heads: range) -> list[Run]:
    """The bytes of some layers and heads, what is together on both sides as one run."""
    head = head_nbytes(layout)
    runs: list[Run] = []
    for layer in layers:
        for kv in range(2):
            begins = [
                head
                * (((layer - side.layers.start) * 2 + kv) * len(side.heads) + heads.start - side.heads.start)
                for side in (source, target)
            ]
            run = Run(begins[0], begins[1], len(heads) * head)
            if runs and _follows(runs[-1], run):
                run = Run(runs[-1].source, runs[-1].target, runs.pop().nbytes + run.nbytes)
            runs.append(run)
    return runs


def _follows(before: Run, run: Run) -> bool:
    return (before.source + before.nbytes, before.target + before.nbytes) == (run.source, run.target)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _words(run: range) -> str:
    return f"{run.start} to {run.stop - 1}"
