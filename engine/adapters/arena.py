"""The adapters' weights on one rank, and their products in a step."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moonpool.engine.adapters.peft import PeftAdapter, targets
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.sharding.parallel_plan import Shard
from moonpool.engine.sharding.tensor_slices import TensorSlices
from moonpool.kernels.dispatch import add_lora

Fused = tuple[str, tuple[str, ...]]
# Projections with results side by side, by their block.
QKV: Fused = ("self_attn", ("q_proj", "k_proj", "v_proj"))
OUT: Fused = ("self_attn", ("o_proj",))
GATE_UP: Fused = ("mlp", ("gate_proj", "up_proj"))
DOWN: Fused = ("mlp", ("down_proj",))


def row_nbytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one rank of an adapter of all projections, on all processes of a group; 0: the model takes no
    adapters."""
    return sum(map(sum, targets(config).values())) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Extent:
    """The rows of one adapter in every matrix of an arena. projections: those that it changes."""

    first: int
    rank: int
    projections: frozenset[str]

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.rank)


class Place(NamedTuple):
    """A module's columns of the results that it is side by side with others in."""

    module: str
    projection: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Matrices:
    """Of one module, with a row for each rank of every adapter. a: [rows, in]; b: [rows, out], scaled."""

    a: Tensor
    b: Tensor


class AdapterArena:
    """One process's part of the resident adapters: of projections split by outputs the whole A and their rows
    of B, of those split by inputs their columns of A and the whole B. Results are summands as theirs.

    ``load`` runs beside steps, which do not use the rows that it writes.
    """

    def __init__(
        self, config: ModelConfig, shard: Shard, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self._first_layer = shard.layers.start
        self._dtype, self._device = dtype, device
        slices, whole = TensorSlices(config, shard), targets(config)
        self._parts = {
            module: _both(slices(f"{module}.weight"))
            for module in whole
            if int(module.split(".")[2]) in shard.layers
        }
        self._sizes = {
            module: (len(range(whole[module][0])[rows]), len(range(whole[module][1])[columns]))
            for module, (rows, columns) in self._parts.items()
        }
        self._places = {
            (layer, fused): self._places_of(layer, fused)
            for layer in range(len(shard.layers))
            for fused in (QKV, OUT, GATE_UP, DOWN)
        }
        self._matrices: dict[str, Matrices] = {}  # by module, from its first adapter on
        self._extents: dict[int, Extent] = {}  # by the adapter's number
        self._loading = threading.Lock()
        self._latest: tuple[tuple[int, ...], Tensor] | None = None  # the table of the last step's adapters

    def _places_of(self, layer: int, fused: Fused) -> list[Place]:
        block, projections = fused
        places, start = [], 0
        for projection in projections:
            module = f"model.layers.{self._first_layer + layer}.{block}.{projection}"
            if module in self._sizes:
                end = start + self._sizes[module][0]
                places.append(Place(module, projection, start, end))
                start = end
        return places

    def load(self, adapter: PeftAdapter, number: int, first: int, num_rows: int) -> None:
        """Write the adapter to the rows from ``first`` on, under a new number; what was in them is gone.

        num_rows: of the arena, the same in all calls. From any thread.
        """
        projections = frozenset(module.rpartition(".")[2] for module in adapter.factors)
        extent = Extent(first, adapter.rank, projections)
        with self._loading:
            for other, former in list(self._extents.items()):
                if former.first < extent.rows.stop and first < former.rows.stop:
                    del self._extents[other]
            for module in self._parts:
                self._load_module(adapter, module, extent.rows, num_rows)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._extents[number] = extent

    def _load_module(self, adapter: PeftAdapter, module: str, own: slice, num_rows: int) -> None:
        factors, matrices = adapter.factors.get(module), self._matrices.get(module)
        if matrices is None:
            if factors is None:
                return
            outs, ins = self._sizes[module]
            a, b = (_zeros(num_rows, width, self._dtype, self._device) for width in (ins, outs))
            matrices = self._matrices[module] = Matrices(a, b)
        end = own.start
        if factors is not None:
            rows, columns = self._parts[module]
            end += len(factors.a)
            matrices.a[own.start : end].copy_(factors.a[:, columns])
            matrices.b[own.start : end].copy_(factors.b[:, rows])
        # Beside an adapter that has this module, one that lacks it, or ranks of it, adds 0.
        if end < own.stop:
            matrices.a[end : own.stop] = 0
            matrices.b[end : own.stop] = 0

    def step(self, inputs: StepInputs) -> StepAdapters | None:
        """Return what adds the adapters of these tokens; None: they have none. All are resident."""
        if inputs.adapter_ids is None:
            return None
        extents = [self._extents[number] for number in inputs.adapters]
        if self._latest is None or self._latest[0] != inputs.adapters:
            table = torch.tensor([(one.first, one.rank) for one in extents], dtype=torch.int32)
            self._latest = inputs.adapters, table.to(self._device)
        return StepAdapters(self._matrices, inputs.adapter_ids, self._latest[1], extents, self._places)


class StepAdapters:
    """Adds the adapters of one step's tokens to the results of projections, in place."""

    def __init__(
        self,
        matrices: Mapping[str, Matrices],
        ids: Tensor,
        table: Tensor,
        extents: Sequence[Extent],
        places: Mapping[tuple[int, Fused], Sequence[Place]],
    ) -> None:
        """ids: int32 [num_tokens], indices of ``extents`` or -1; table: int32 [adapters, 2], as those."""
        self._matrices = matrices
        self._ids, self._table = ids, table
        self._max_rank = max(one.rank for one in extents)
        self._projections = frozenset[str]().union(*(one.projections for one in extents))
        self._places = places

    def add(self, y: Tensor, x: Tensor, layer: int, fused: Fused) -> None:
        """Add to y: [num_tokens, out] of all of ``fused``, what the adapters make of x: [num_tokens, in].
        layer: counted from the process's first."""
        for module, projection, start, end in self._places[layer, fused]:
            found = self._matrices.get(module) if projection in self._projections else None
            if found is not None:
                add_lora(y[:, start:end], x, found.a, found.b, self._ids, self._table, self._max_rank)


def _zeros(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[num_rows, width]. On a CPU, rows that were never written take no memory."""
    if device.type != "cpu":
        return torch.zeros((num_rows, width), dtype=dtype, device=device)
    rows = np.zeros((num_rows, width * dtype.itemsize), np.uint8)
    return torch.from_numpy(rows).view(dtype)


_WHOLE = (slice(None), slice(None))


def _both(part: tuple[slice, ...]) -> tuple[slice, slice]:
    """The slices of a matrix's rows and columns; those that are not cut are whole."""
    rows, columns = (*part, *_WHOLE)[:2]
    return rows, columns
