"""The adapters' weights in the KV pool of one rank, and their products in a step."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moonpool.engine.adapters.packing import AdapterPacking, Lines, Ranks
from moonpool.engine.adapters.peft import PeftAdapter
from moonpool.engine.errors import AdapterRefused
from moonpool.engine.model.inputs import StepInputs
from moonpool.kernels.dispatch import add_lora

Fused = tuple[str, tuple[str, ...]]
# Projections with results side by side, by their block.
QKV: Fused = ("self_attn", ("q_proj", "k_proj", "v_proj"))
OUT: Fused = ("self_attn", ("o_proj",))
GATE_UP: Fused = ("mlp", ("gate_proj", "up_proj"))
DOWN: Fused = ("mlp", ("down_proj",))


class Place(NamedTuple):
    """A module's columns of the results that it is side by side with others in. number: of the module."""

    number: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    """blocks: of the pool. lines: int32 [modules, rank, 2], from its begin; ranks: int32 [modules]."""

    blocks: frozenset[int]
    lines: Lines
    ranks: Lines


@dataclass(frozen=True, slots=True)
class _Tables:
    """Of some adapters, by module: ``extents`` and ``lines`` of ``add_lora``, and whether any changes it."""

    adapters: tuple[int, ...]
    extents: tuple[Tensor, ...]
    lines: tuple[Tensor, ...]
    changed: list[bool]
    max_rank: int


class AdapterPages:
    """The adapters in blocks of ``pool``. Results are summands as those of their projections.

    Blocks are written beside steps, which do not use them.
    """

    def __init__(self, packing: AdapterPacking, pool: Tensor) -> None:
        """pool: this process's blocks, contiguous."""
        self._packing, self._device = packing, pool.device
        memory = pool.view(torch.uint8).view(-1)
        itemsize = packing.dtype.itemsize
        self._memory = memory[: len(memory) // itemsize * itemsize].view(packing.dtype)
        self._places = {
            (layer, fused): self._places_of(layer, fused)
            for layer in range(len(packing.shard.layers))
            for fused in (QKV, OUT, GATE_UP, DOWN)
        }
        self._loaded: dict[int, _Loaded] = {}  # by the adapter's number
        self._loading = threading.Lock()
        self._latest: _Tables | None = None

    def _places_of(self, layer: int, fused: Fused) -> list[Place]:
        block, projections = fused
        sizes, start = self._packing.sizes, 0
        numbers = {module: number for number, module in enumerate(sizes)}
        places = []
        for projection in projections:
            module = f"model.layers.{self._packing.shard.layers.start + layer}.{block}.{projection}"
            if module in sizes:
                end = start + sizes[module][0]
                places.append(Place(numbers[module], start, end))
                start = end
        return places

    @torch.inference_mode()
    def write(self, image: Tensor, block_ids: Sequence[int]) -> None:
        """Write an adapter's blocks, see ``AdapterPacking.pack``, beside steps. From any thread."""
        for values, line in zip(image, self._packing.begins(block_ids).tolist(), strict=False):
            first = line * self._packing.values_a_line
            self._memory[first : first + len(values)].copy_(values)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def place(self, ranks: Ranks, number: int, block_ids: Sequence[int]) -> None:
        """Know the adapter of these ranks that these blocks have now, under a new number. From any thread.

        Raises AdapterRefused: the blocks are beyond the reach of the kernels' 32-bit lines.
        """
        begins = self._packing.begins(block_ids)
        lines, own, _ = self._packing.places(ranks)
        blocks, rest = np.divmod(lines, self._packing.lines_a_block)
        with self._loading:
            for other, former in list(self._loaded.items()):
                if not former.blocks.isdisjoint(block_ids):
                    del self._loaded[other]
            found = begins[blocks] + rest
            if found.size and found.max() > np.iinfo(np.int32).max:
                raise AdapterRefused(
                    Path(f"adapter {number}"),
                    "its blocks are beyond the first 128 GiB of the pool, where kernels do not reach: set a "
                    "smaller engine.pool_nbytes",
                )
            lines = found.astype(np.int32)
            self._loaded[number] = _Loaded(frozenset(block_ids), lines, own)

    def load(self, path: Path, digest: str, ranks: Ranks, number: int, block_ids: Sequence[int]) -> None:
        """Write the adapter at ``path`` that ``digest`` names, and ``place`` it. Raises AdapterRefused."""
        packing = self._packing
        self.write(packing.pack(PeftAdapter.read(path, digest, packing.config)), block_ids)
        self.place(ranks, number, block_ids)

    def step(self, inputs: StepInputs) -> StepAdapters | None:
        """Return what adds the adapters of these tokens; None: they have none. All are loaded."""
        if inputs.adapter_ids is None:
            return None
        tables = self._latest
        if tables is None or tables.adapters != inputs.adapters:
            tables = self._latest = self._tables(inputs.adapters)
        return StepAdapters(self._memory, inputs.adapter_ids, tables, self._places)

    def _tables(self, numbers: tuple[int, ...]) -> _Tables:
        loaded = [self._loaded[number] for number in numbers]
        lines = np.concatenate([one.lines for one in loaded], 1)
        ranks = np.stack([one.ranks for one in loaded], 1)
        firsts = np.cumsum([0, *(one.lines.shape[1] for one in loaded[:-1])], dtype=np.int32)
        extents = np.stack((np.broadcast_to(firsts, ranks.shape), ranks), 2)
        on_extents, on_lines = (
            torch.from_numpy(each).to(self._device).unbind(0) for each in (extents, lines)
        )
        changed = [any(of_module) for of_module in ranks.tolist()]
        return _Tables(numbers, on_extents, on_lines, changed, max(1, int(ranks.max(initial=1))))


class StepAdapters:
    """Adds the adapters of one step's tokens to the results of projections, in place."""

    def __init__(
        self,
        memory: Tensor,
        ids: Tensor,
        tables: _Tables,
        places: Mapping[tuple[int, Fused], Sequence[Place]],
    ) -> None:
        """ids: int32 [num_tokens], indices of ``tables.adapters`` or -1."""
        self._memory, self._ids, self._tables, self._places = memory, ids, tables, places

    def add(self, y: Tensor, x: Tensor, layer: int, fused: Fused) -> None:
        """Add to y: [num_tokens, out] of all of ``fused``, what the adapters make of x: [num_tokens, in].
        layer: counted from the process's first."""
        tables = self._tables
        for number, start, end in self._places[layer, fused]:
            if tables.changed[number]:
                extents, lines = tables.extents[number], tables.lines[number]
                add_lora(y[:, start:end], x, self._memory, self._ids, extents, lines, tables.max_rank)
