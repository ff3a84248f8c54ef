"""Shards of KV blocks on parallel ranks, and the copies between nodes that shard them differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moonpool.kvstore.errors import LayoutError


class ShardableLayout(Protocol):
    """The position of each layer's heads in a whole block; ``KVLayout`` is one."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def num_components(self) -> int:
        """What each head of a layer has: 2, K and V, or 1, a latent."""
        ...

    @property
    def head_nbytes(self) -> int:
        """One component of one head of one layer, which no rank splits."""
        ...

    @property
    def block_nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class BlockShard:
    """The layers and KV heads of every block on one rank: ``[layers, components, heads, tokens, dim]``."""

    layers: range
    heads: range

    @classmethod
    def whole(cls, layout: ShardableLayout) -> BlockShard:
        return cls(range(layout.num_layers), range(layout.num_kv_heads))

    def block_nbytes(self, layout: ShardableLayout) -> int:
        return layout.num_components * len(self.layers) * len(self.heads) * layout.head_nbytes


@dataclass(frozen=True, slots=True)
class SplitLayout:
    """A ``ShardableLayout`` known only by which rank has which shard of the block."""

    num_layers: int
    num_kv_heads: int
    head_nbytes: int
    # Also of latents, taken as two halves: the only head is never split, so the runs are the same.
    num_components: int = 2

    @classmethod
    def of(cls, block_nbytes: int, shards: Sequence[BlockShard]) -> SplitLayout:
        """Raises ``LayoutError``: blocks of this size cannot be split into these shards."""
        num_layers = max(shard.layers.stop for shard in shards)
        num_kv_heads = max(shard.heads.stop for shard in shards)
        num_cells = 2 * num_layers * num_kv_heads
        if not num_cells or block_nbytes % num_cells:
            raise LayoutError(
                f"blocks of {block_nbytes} bytes have no {num_layers} layers of {num_kv_heads} KV heads"
            )
        return cls(num_layers, num_kv_heads, block_nbytes // num_cells)

    @property
    def block_nbytes(self) -> int:
        return self.num_components * self.num_layers * self.num_kv_heads * self.head_nbytes


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a block that are contiguous on both sides; offsets are from the block's start."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardOverlap:
    """The bytes a target reads from one source, for every block."""

    source: int  # index into the sources
    runs: tuple[Run, ...]


def overlaps(
    layout: ShardableLayout, sources: Sequence[BlockShard], target: BlockShard, target_rank: int = 0
) -> list[ShardOverlap]:
    """Choose the sources from which ``target`` reads its bytes, each byte once.

    ``layout``: of the whole block. Of sources with equal shards, ``target_rank`` chooses one, so that equal
    targets spread over them. Raises ``LayoutError``: the sources lack bytes.
    """
    copies: dict[BlockShard, list[int]] = {}
    for i, source in enumerate(sources):
        copies.setdefault(source, []).append(i)
    found: list[ShardOverlap] = []
    num_cells = 0
    for source, numbers in copies.items():
        layers, heads = _common(source.layers, target.layers), _common(source.heads, target.heads)
        if layers and heads:
            num_cells += len(layers) * len(heads)
            runs = _runs(layout, source, target, layers, heads)
            found.append(ShardOverlap(numbers[target_rank % len(numbers)], tuple(runs)))
    if num_cells != len(target.layers) * len(target.heads):
        raise LayoutError(
            f"layers {_describe(target.layers)}, KV heads {_describe(target.heads)} are not held once each"
        )
    return found


def canonical_runs(layout: ShardableLayout, shards: Sequence[BlockShard]) -> list[tuple[int, Run]]:
    """Return the whole block in byte order, as (shard, run into the whole block)."""
    runs = [
        (overlap.source, run)
        for overlap in overlaps(layout, shards, BlockShard.whole(layout))
        for run in overlap.runs
    ]
    return sorted(runs, key=lambda entry: entry[1].target)


def _runs(
    layout: ShardableLayout, source: BlockShard, target: BlockShard, layers: range, heads: range
) -> list[Run]:
    """The bytes of some layers and heads, as runs that are contiguous on both sides."""
    head = layout.head_nbytes
    runs: list[Run] = []
    for layer in layers:
        for component in range(layout.num_components):
            begins = [
                head
                * (
                    ((layer - side.layers.start) * layout.num_components + component) * len(side.heads)
                    + heads.start
                    - side.heads.start
                )
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


def _describe(run: range) -> str:
    return f"{run.start} to {run.stop - 1}"
