"""The choice of a cell for a request: by its prefix, within a bound on load. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from moonpool.conductor.admission.tenants import Regions, may_hold

HOT_SHARE: Final = 0.25
"""A prefix is hot, and served by several cells, from this part of the average cell's requests on."""
HOT_PER_S: Final = 1.0
"""And from this many requests a second on."""
LOAD_BOUND: Final = 1.5
"""A cell with more requests in flight a node than this times the average takes only what must go there."""
_STEP: Final = 0.05  # how fast weights follow loads: part of the difference, each time that a cell tells
_LEAST_WEIGHT: Final = 0.2
_NOTHING_PER_S: Final = 1e-6  # what is left of sums that have gone

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(eq=False, slots=True)
class Cell:
    """One cell as a router knows it."""

    name: str
    region: str = ""
    usable: bool = False  # it answers, is not draining, and has nodes
    models: Collection[str] = ()
    num_nodes: float = 0.0
    num_requests: float = 0.0  # in flight
    requests_per_s: float = 0.0
    hot: Mapping[int, float] = field(default_factory=dict)  # requests a second by prefix

    def status(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "region": self.region,
            "usable": self.usable,
            "models": sorted(self.models),
            "num_nodes": self.num_nodes,
            "num_requests": self.num_requests,
            "requests_per_s": self.requests_per_s,
            "num_hot_prefixes": len(self.hot),
        }


class RegionCells:
    """The cells of one region, as arrays. After a change of a cell: ``refresh``."""

    def __init__(self, name: str, cells: Sequence[Cell]) -> None:
        self.name = name
        self.cells = tuple(cells)
        self._number = {cell: number for number, cell in enumerate(cells)}
        self._everything = np.arange(len(cells))
        self._seeds = np.array([xxh3_64_intdigest(cell.name.encode()) for cell in cells], np.uint64)
        self._usable = np.zeros(len(cells), bool)
        self._nodes = np.ones(len(cells))
        self._requests = np.zeros(len(cells))
        self._shares = np.ones(len(cells))  # what each takes of the prefixes that its nodes would give it
        self._seen: list[Mapping[int, float]] = [{} for _ in cells]
        self._hot: dict[int, float] = {}  # of all cells together
        self._hot_from_per_s = HOT_PER_S
        self._models: frozenset[str] = frozenset()
        for cell in cells:
            self.refresh(cell)

    def refresh(self, cell: Cell) -> None:
        """Read a cell anew."""
        number = self._number[cell]
        for digest, per_s in self._seen[number].items():
            self._hot[digest] -= per_s
            if self._hot[digest] < _NOTHING_PER_S:
                del self._hot[digest]
        for digest, per_s in cell.hot.items():
            self._hot[digest] = self._hot.get(digest, 0.0) + per_s
        self._seen[number] = cell.hot
        self._usable[number] = cell.usable
        self._nodes[number] = max(cell.num_nodes, 1.0)
        self._requests[number] = cell.num_requests
        usable = [one for one in self.cells if one.usable]
        average = sum(one.requests_per_s for one in usable) / max(len(usable), 1)
        self._hot_from_per_s = max(HOT_SHARE * average, HOT_PER_S)
        self._models = frozenset().union(*(one.models for one in usable))
        self._balance(number)

    def _balance(self, number: int) -> None:
        """Take a few prefixes from a cell with more than the average load, and give them back slowly.

        By the bound alone all prefixes of a cell would leave it together, and return together.
        """
        average = self._requests[self._usable].sum() / max(self._nodes[self._usable].sum(), 1.0)
        load = self._requests[number] / self._nodes[number]
        # Where there is no load, the average is none to compare with.
        ratio = min(max(average / load, 0.5), 2.0) if load > 1.0 else 2.0
        self._shares[number] = min(max(self._shares[number] * ratio**_STEP, _LEAST_WEIGHT), 1.0)

    def add(self, cell: Cell, count: int) -> None:
        """Requests began (1) or ended (-1) there since it last told."""
        cell.num_requests = max(cell.num_requests + count, 0.0)
        self._requests[self._number[cell]] = cell.num_requests

    def knows(self, model: str) -> bool:
        """Whether a usable cell serves it."""
        return model in self._models

    def order(self, digests: Sequence[int], model: str | None = None) -> list[Cell]:
        """Usable cells, the best for a request with these prefixes first. ``model``: that it asks for.

        Highest random weight (rendezvous hashing), weighted by nodes and by what balances loads, on the
        shortest prefix that is not hot. A hot prefix has as many cells as it fills quarters of, and the rest
        of the prompt chooses among them. Cells beyond ``LOAD_BOUND`` come last, the least loaded first.
        """
        usable = self._everything[self._usable]
        if model is not None and self.knows(model):
            usable = np.array([one for one in usable if model in self.cells[one].models], np.intp)
        if not len(usable):
            return []
        loads = self._requests[usable] / self._nodes[usable]
        average = float(self._requests[usable].sum() / self._nodes[usable].sum())
        bound = max(LOAD_BOUND * average, 1.0)
        if digests:
            usable = self._affine(digests, usable)
            loads = self._requests[usable] / self._nodes[usable]
        else:
            usable = usable[np.argsort(loads, kind="stable")]
            loads = np.sort(loads)
        # Stable: those within the bound keep the order of the prefix.
        ranked = np.argsort(np.where(loads <= bound, 0.0, loads), kind="stable")
        return [self.cells[one] for one in usable[ranked]]

    def _affine(self, digests: Sequence[int], usable: Indices) -> Indices:
        ranked = self._by_weight(digests[0], usable)
        size = len(ranked)
        for digest, following in pairwise(digests):
            if (per_s := self._hot.get(digest, 0.0)) < self._hot_from_per_s:
                break
            size = min(size, math.ceil(per_s / self._hot_from_per_s))
            if size == 1:
                break
            ranked = np.concatenate((self._by_weight(following, ranked[:size]), ranked[size:]))
        return ranked

    def _by_weight(self, digest: int, among: Indices) -> Indices:
        mixed = self._seeds[among] ^ np.uint64(digest)
        for shift, factor in _MIX:
            mixed = (mixed ^ (mixed >> shift)) * factor
        mixed ^= mixed >> np.uint64(33)
        uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        times: Floats = -np.log(uniform) / (self._nodes[among] * self._shares[among])
        return among[np.argsort(times)]


# The finalizer of SplitMix64.
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def candidates(
    regions: Sequence[RegionCells],
    digests: Sequence[int],
    *,
    model: str | None = None,
    confined: Regions = frozenset(),
    most: int | None = None,
) -> Iterator[Cell]:
    """Cells to try one after the other: those of the first region, then those of the next.

    ``regions``: the nearest first. ``confined``: the only regions that may have the request; empty: any.
    ``most``: of each region; None: all.
    """
    allowed = [region for region in regions if may_hold(confined, region.name)]
    if model is not None and any(region.knows(model) for region in allowed):
        allowed = [region for region in allowed if region.knows(model)]
    for region in allowed:
        yield from region.order(digests, model)[:most]
