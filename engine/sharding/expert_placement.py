"""Placement of experts on ranks, hot ones with copies: planned from measured load, stored as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from moonpool.runtime.errors import ConfigError

_PATH_OPTION = "engine.parallel.expert_plan_path"
#: Of one layer: the ranks of each expert, ascending.
Holders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """``layers[i][e]``: the ranks with expert e of layer i, in 0 … ep - 1.

    With ep < tp such a rank means tp / ep neighbouring tp ranks, which split the columns of its experts.
    Entries of dense layers are unused.
    """

    num_ranks: int
    layers: tuple[Holders, ...]

    @classmethod
    def even(cls, num_layers: int, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Place experts in runs of nearly equal length, without copies."""
        return cls(num_ranks, (_even(num_experts, num_ranks),) * num_layers)

    def experts_of(self, layer: int, rank: int) -> tuple[int, ...]:
        """Return the experts of a layer on ``rank``, ascending."""
        return tuple(e for e, ranks in enumerate(self.layers[layer]) if rank in ranks)

    def rank_load(self, load: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """load: rows [num_layers, num_experts] → rows [num_layers, num_ranks], divided evenly over copies."""
        rows = [
            _rank_load(of_layer, h, self.num_ranks) for of_layer, h in zip(load, self.layers, strict=True)
        ]
        return np.array(rows)

    def skew(self, load: npt.NDArray[np.int64]) -> float:
        """Return the rows of a layer's busiest rank over the mean of its ranks, as mean over layers with
        rows; 1 is even."""
        of_layers = skew(self.rank_load(load))
        return float(of_layers.mean()) if len(of_layers) else 1.0

    @property
    def digest(self) -> str:
        """A name for this placement."""
        return xxhash.xxh3_64_hexdigest(repr((self.num_ranks, self.layers)).encode())

    def to_json(self) -> str:
        return json.dumps({"num_ranks": self.num_ranks, "layers": self.layers}) + "\n"

    @classmethod
    def read(cls, path: Path) -> ExpertPlacement:
        """Read a placement. Raises ConfigError for a missing or invalid file."""
        try:
            return cls.from_json(path.read_text(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise _no_placement(str(path), error) from error

    @classmethod
    def from_json(cls, text: str, source: str = "this") -> ExpertPlacement:
        """The opposite of ``to_json``. Raises ConfigError."""
        try:
            return cls.unpack(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise _no_placement(source, error) from error

    @classmethod
    def unpack(cls, words: dict[str, object]) -> ExpertPlacement:
        """Restore from the JSON of ``asdict``. Raises ValueError for missing fields or ranks."""
        num_ranks, layers = words["num_ranks"], words["layers"]
        if not isinstance(num_ranks, int) or not isinstance(layers, list | tuple) or not layers:
            raise ValueError("num_ranks or layers are missing")
        plan = cls(num_ranks, tuple(tuple(tuple(sorted(set(r))) for r in layer) for layer in layers))
        for holders in plan.layers:
            for expert, ranks in enumerate(holders):
                if not ranks or not all(isinstance(rank, int) and 0 <= rank < num_ranks for rank in ranks):
                    raise ValueError(f"expert {expert} is on ranks {list(ranks)} of {num_ranks}")
        return plan

    def check(self, num_layers: int, num_experts: int, num_ranks: int) -> None:
        """Raise ConfigError if the model or the number of ranks differs."""
        found = (len(self.layers), len(self.layers[0]), self.num_ranks)
        if found != (num_layers, num_experts, num_ranks) or len(set(map(len, self.layers))) != 1:
            raise ConfigError(
                f"{_PATH_OPTION} is for {found[0]} layers of {found[1]} experts on {found[2]} ranks, "
                f"this node has {num_layers} layers of {num_experts} on {num_ranks} (engine.parallel.ep): "
                "make one with `moonpool experts`",
                _PATH_OPTION,
            )
        for layer, rank in product(range(num_layers), range(num_ranks)):
            if num_experts and not self.experts_of(layer, rank):
                raise ConfigError(
                    f"{_PATH_OPTION}: rank {rank} has no expert of layer {layer}: make a placement with "
                    "`moonpool experts`",
                    _PATH_OPTION,
                )


def _no_placement(source: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{_PATH_OPTION}: {source} is not a placement of experts ({error}): make one with `moonpool experts`",
        _PATH_OPTION,
    )


def plan_experts(load: npt.NDArray[np.int64], num_ranks: int, num_replicas: int) -> ExpertPlacement:
    """Place experts to balance ``load``: measured rows [num_layers, num_experts]. A pure function.

    In each layer the expert with the most rows per copy gets another copy, ``num_replicas`` times. Then
    copies are placed, largest first, each on the rank with the fewest rows that has no copy of the expert
    and, if possible, fewer experts than the average. The even placement is returned where its busiest rank is
    better.
    """
    assert num_ranks > 0 <= num_replicas
    return ExpertPlacement(
        num_ranks, tuple(_plan_layer(of_layer, num_ranks, num_replicas) for of_layer in load)
    )


def _plan_layer(load: npt.NDArray[np.int64], num_ranks: int, num_replicas: int) -> Holders:
    num_experts = len(load)
    copies = np.ones(num_experts, np.int64)
    for _ in range(num_replicas):
        rows_per_copy = np.where(copies < num_ranks, load / copies, -1.0)
        hottest = int(rows_per_copy.argmax())
        if rows_per_copy[hottest] <= 0:
            break  # no other copy would help
        copies[hottest] += 1
    room = -(-int(copies.sum()) // num_ranks)
    rows_per_copy = load / copies
    placed: list[list[int]] = [[] for _ in range(num_ranks)]
    rows = [0.0] * num_ranks
    for expert in sorted(range(num_experts), key=lambda e: (-rows_per_copy[e], e)):
        for _ in range(copies[expert]):
            free = [r for r in range(num_ranks) if expert not in placed[r]]
            # A full rank gets another expert only if all others have a copy of it.
            rank = min(free, key=lambda r: (len(placed[r]) >= room, rows[r], len(placed[r]), r))
            placed[rank].append(expert)
            rows[rank] += rows_per_copy[expert]
    packed = tuple(tuple(r for r in range(num_ranks) if e in placed[r]) for e in range(num_experts))
    candidates = (packed, _even(num_experts, num_ranks))
    return min(candidates, key=lambda holders: _rank_load(load, holders, num_ranks).max())


def _even(num_experts: int, num_ranks: int) -> Holders:
    return tuple((((e + 1) * num_ranks - 1) // num_experts,) for e in range(num_experts))


def _rank_load(
    load: npt.NDArray[np.int64], holders: Sequence[Sequence[int]], num_ranks: int
) -> npt.NDArray[np.float64]:
    rows = np.zeros(num_ranks)
    for expert, ranks in enumerate(holders):
        for rank in ranks:
            rows[rank] += load[expert] / len(ranks)
    return rows


def skew(load: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the largest row count of a layer over its mean, for each layer with any rows: 1 is even.

    load: rows [num_layers, num_experts], or [num_layers, num_ranks].
    """
    busy = load[load.sum(axis=1) > 0]
    return busy.max(axis=1) / busy.mean(axis=1) if len(busy) else np.empty(0)
