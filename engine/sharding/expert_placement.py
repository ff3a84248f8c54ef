"""Which ranks hold which experts, hot ones more than once: decided from measured load, kept as JSON."""

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
#: Of one layer: for each expert the ranks that hold a copy, ascending.
Holders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """``layers[i][e]``: the ranks that hold layer i's expert e. Ranks are 0 … ep - 1: where ep is less than
    tp, each stands for the tp / ep neighbours that share the columns of its experts. Dense layers have an
    entry that nobody reads.
    """

    num_ranks: int
    layers: tuple[Holders, ...]

    @classmethod
    def even(cls, num_layers: int, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Equal runs of experts, or as nearly as can be; none twice."""
        return cls(num_ranks, (_deal(num_experts, num_ranks),) * num_layers)

    def experts_of(self, layer: int, rank: int) -> tuple[int, ...]:
        """The experts of a layer that ``rank`` holds, ascending."""
        return tuple(e for e, ranks in enumerate(self.layers[layer]) if rank in ranks)

    def rank_load(self, load: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """load: rows [num_layers, num_experts] → rows [num_layers, num_ranks], an expert's shared out evenly
        to its copies."""
        rows = [
            _rank_load(of_layer, h, self.num_ranks) for of_layer, h in zip(load, self.layers, strict=True)
        ]
        return np.array(rows)

    def skew(self, load: npt.NDArray[np.int64]) -> float:
        """The rows of each layer's busiest rank over the mean of its ranks, the mean of all layers that were
        given any: 1 is even. 1 where none was."""
        rows = self.rank_load(load)
        busy = rows[rows.sum(axis=1) > 0]
        return float((busy.max(axis=1) / busy.mean(axis=1)).mean()) if len(busy) else 1.0

    @property
    def digest(self) -> str:
        """Names the plan."""
        return xxhash.xxh3_64_hexdigest(repr((self.num_ranks, self.layers)).encode())

    def to_json(self) -> str:
        return json.dumps({"num_ranks": self.num_ranks, "layers": self.layers}) + "\n"

    @classmethod
    def read(cls, path: Path) -> ExpertPlacement:
        """Raises ConfigError where there is no such plan."""
        try:
            return cls.unpack(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{_PATH_OPTION}: {path} is no readable plan of experts ({error}): make one with "
                "`moonpool experts`",
                _PATH_OPTION,
            ) from error

    @classmethod
    def unpack(cls, words: dict[str, object]) -> ExpertPlacement:
        """Of its ``asdict``, having been JSON. Raises ValueError where ranks or experts are missing in it."""
        num_ranks, layers = words["num_ranks"], words["layers"]
        if not isinstance(num_ranks, int) or not isinstance(layers, list | tuple) or not layers:
            raise ValueError("num_ranks and layers are wanted")
        plan = cls(num_ranks, tuple(tuple(tuple(sorted(set(r))) for r in layer) for layer in layers))
        for holders in plan.layers:
            for expert, ranks in enumerate(holders):
                if not ranks or not all(isinstance(rank, int) and 0 <= rank < num_ranks for rank in ranks):
                    raise ValueError(f"expert {expert} is on ranks {list(ranks)} of {num_ranks}")
        return plan

    def check(self, num_layers: int, num_experts: int, num_ranks: int) -> None:
        """Raise ConfigError unless it is one for such a model on so many ranks."""
        found = (len(self.layers), len(self.layers[0]), self.num_ranks)
        if found != (num_layers, num_experts, num_ranks) or len(set(map(len, self.layers))) != 1:
            raise ConfigError(
                f"{_PATH_OPTION} is a plan for {found[0]} layers of {found[1]} experts on {found[2]} ranks, "
                f"this node has {num_layers} layers of {num_experts} on {num_ranks} (engine.parallel.ep): "
                "make one with `moonpool experts`",
                _PATH_OPTION,
            )
        for layer, rank in product(range(num_layers), range(num_ranks)):
            if num_experts and not self.experts_of(layer, rank):
                raise ConfigError(
                    f"{_PATH_OPTION}: rank {rank} holds no expert of layer {layer}: make a plan with "
                    "`moonpool experts`",
                    _PATH_OPTION,
                )


def plan_experts(load: npt.NDArray[np.int64], num_ranks: int, num_replicas: int) -> ExpertPlacement:
    """A plan that evens out ``load``: rows [num_layers, num_experts], measured.

    Of each layer, ``num_replicas`` times the expert with the most rows a copy gets another copy; then the
    copies are packed, the fullest first, each onto the rank that has the fewest rows so far, of those that
    have room (no rank holds more experts than an even deal of all copies) and no copy of it. Where the plain
    deal is better, that is taken: the busiest rank never has more rows than there. A pure function: equal
    arguments, equal plans.
    """
    assert num_ranks > 0 <= num_replicas
    return ExpertPlacement(
        num_ranks, tuple(_plan_layer(of_layer, num_ranks, num_replicas) for of_layer in load)
    )


def _plan_layer(load: npt.NDArray[np.int64], num_ranks: int, num_replicas: int) -> Holders:
    num_experts = len(load)
    copies = np.ones(num_experts, np.int64)
    for _ in range(num_replicas):
        share = np.where(copies < num_ranks, load / copies, -1.0)
        hottest = int(share.argmax())
        if share[hottest] <= 0:
            break  # nothing is left that another copy would relieve
        copies[hottest] += 1
    room = -(-int(copies.sum()) // num_ranks)
    share = load / copies
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    rows = [0.0] * num_ranks
    for expert in sorted(range(num_experts), key=lambda e: (-share[e], e)):
        for _ in range(copies[expert]):
            free = [r for r in range(num_ranks) if expert not in held[r]]
            # What is full already takes another one only where all others have a copy of it.
            rank = min(free, key=lambda r: (len(held[r]) >= room, rows[r], len(held[r]), r))
            held[rank].append(expert)
            rows[rank] += share[expert]
    packed = tuple(tuple(r for r in range(num_ranks) if e in held[r]) for e in range(num_experts))
    candidates = (packed, _deal(num_experts, num_ranks))
    return min(candidates, key=lambda holders: _rank_load(load, holders, num_ranks).max())


def _deal(num_experts: int, num_ranks: int) -> Holders:
    return tuple((((e + 1) * num_ranks - 1) // num_experts,) for e in range(num_experts))


def _rank_load(
    load: npt.NDArray[np.int64], holders: Sequence[Sequence[int]], num_ranks: int
) -> npt.NDArray[np.float64]:
    rows = np.zeros(num_ranks)
    for expert, ranks in enumerate(holders):
        for rank in ranks:
            rows[rank] += load[expert] / len(ranks)
    return rows
