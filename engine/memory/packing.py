"""Packs: the full layers of several blocks that every window has passed, in the room of one block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MOST_MOVES = 32
"""Blocks that one step moves into packs: 12 MiB of gpt-oss-20b with blocks of 16 in bfloat16."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a model's blocks are packed, where some layers have windows and others attend to all tokens.

    A block is a page for each layer, in order. Once every window has passed it, only the pages of its full
    layers are read. A pack is a block with these pages of ``len(shifts)`` blocks: those of block k are
    ``shifts[k]`` pages away from where a whole block has them, and no two have the same page.

    A *place* says where the full layers of a block lie: page ``place + shifts[0] + layer`` of the pool.
    """

    num_layers: int
    full_layers: tuple[int, ...]
    shifts: tuple[int, ...]  # ascending, at least two
    window: int  # the widest, in tokens

    @classmethod
    def of(cls, windows: Sequence[int]) -> Packing | None:
        """windows: of each layer, 0: it attends to all tokens. None: packs would save nothing."""
        full = tuple(layer for layer, window in enumerate(windows) if not window)
        if not full:
            return None
        taken: set[int] = set()
        shifts: list[int] = []
        for shift in range(-full[0], len(windows) - full[-1]):
            pages = {layer + shift for layer in full}
            if not pages & taken:
                taken |= pages
                shifts.append(shift)
        shifts = shifts[:MOST_MOVES]
        return cls(len(windows), full, tuple(shifts), max(windows)) if len(shifts) > 1 else None

    @classmethod
    def choose(cls, windows: Sequence[int], *, pp: int, cp: int, runs_ahead: bool) -> Packing | None:
        """As ``of``; None also with a pipeline, with context parallelism and on a GPU: each rank would have
        other layers, or other blocks, and a step in flight would read what has moved."""
        return None if pp > 1 or cp > 1 or runs_ahead else cls.of(windows)

    def place(self, block: int) -> int:
        """Return the place of a whole block."""
        return block * self.num_layers - self.shifts[0]

    def place_in(self, pack: int, k: int) -> int:
        """Return the k-th place of a pack, which is block ``pack`` of the pool."""
        return self.place(pack) + self.shifts[k]

    def places(self, block_table: Sequence[int], packed: dict[int, int]) -> npt.NDArray[np.int32]:
        """Return the place of each block of a table. packed: places by column, of those in packs."""
        found = (np.array(block_table, np.int64) * self.num_layers - self.shifts[0]).astype(np.int32)
        found[list(packed)] = list(packed.values())
        return found

    def views(self, pool: Tensor) -> dict[int, Tensor]:
        """Return for each full layer a view of the pool, [places, 1, …], in which a place is a block's
        number and the layer is layer 0. pool: [num_blocks, num_layers, …], contiguous."""
        pages = pool.view(-1, 1, *pool.shape[2:])
        return {layer: pages[layer + self.shifts[0] :] for layer in self.full_layers}

    def move(self, pool: Tensor, moves: Tensor) -> None:
        """Copy the full layers of blocks. moves: int32 [n, 2], places before and after, none twice."""
        pages = pool.view(torch.uint8).view(pool.shape[0] * self.num_layers, -1)
        layers = torch.tensor(self.full_layers) + self.shifts[0]
        before, after = (moves.long()[:, :, None] + layers).unbind(1)
        pages[after.flatten()] = pages[before.flatten()]
