"""What is true in a simulated cluster, beside what its scheduler believes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from itertools import accumulate
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.block_map import BlockMap
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.inputs.errors import Errors

# Beyond these sizes a profile is extrapolated: uncached and cached tokens of a prefill; sequences and tokens
# of a batch.
_MEASURED = {"prefill": (1024, 1024), "decode": (8, 8 * 1024)}
# Factors of four beyond.
_BEYOND = 16


class Reality:
    """Draws the truth. Without errors nothing is drawn, and every factor is exactly 1."""

    def __init__(self, errors: Errors, seed: int, num_nodes: Mapping[str, int]) -> None:
        """``num_nodes``: at the start, by stage."""
        self._errors = errors
        self._rng = random.Random(f"reality {seed}")
        self._num_nodes = num_nodes
        self._nodes: dict[str, list[float]] = {}  # factors of nodes to come, by stage
        walk = random.Random(f"sizes {seed}")
        self._sizes = {
            stage: [_walk(walk, errors.size) if errors.size else [] for _ in sizes]
            for stage, sizes in _MEASURED.items()
        }

    def node_factor(self, stage: str) -> float:
        """Real over believed seconds of a new node's prefills, or of its decode steps.

        The nodes of the start have the quantiles of the distribution, scaled so that they do as much together
        as is believed: errors make a cluster neither faster nor slower.
        """
        spread = self._errors.node
        if not spread:
            return 1.0
        if not (coming := self._nodes.get(stage)):
            count = max(self._num_nodes[stage], 1)
            speeds = [math.exp(spread * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
            coming = self._nodes[stage] = [fmean(speeds) / speed for speed in speeds]
            self._rng.shuffle(coming)
        return coming.pop()

    def work_factor(self, stage: str, *sizes: int) -> float:
        """Real over expected seconds of one prefill, or of one run of decode steps.

        ``sizes``: uncached and cached tokens, or sequences and tokens of the batch. What is due to them is
        the same on all nodes, and stays.
        """
        factor = self._factor(self._errors.work)
        if not self._errors.size:
            return factor
        beyond = 0.0
        for curve, size, known in zip(self._sizes[stage], sizes, _MEASURED[stage], strict=True):
            beyond += float(np.interp(math.log(max(size / known, 1.0), 4), range(_BEYOND + 1), curve))
        return factor * math.exp(beyond)

    def link_factor(self) -> float:
        """Real over believed bandwidth of a new node's link."""
        return self._factor(self._errors.link)

    def index_lag_s(self) -> float:
        mean_s = self._errors.index_s
        return self._rng.expovariate(1 / mean_s) if mean_s else 0.0

    def _factor(self, spread: float) -> float:
        # The mean is 1: on average, what is believed is true.
        return self._rng.lognormvariate(-(spread**2) / 2, spread) if spread else 1.0


def _walk(rng: random.Random, spread: float) -> list[float]:
    """A curve that leaves 0 at random."""
    return list(accumulate((rng.gauss(0.0, spread) for _ in range(_BEYOND)), initial=0.0))


class NodeIndex:
    """Changes that one node publishes. They are seen later, in their order."""

    def __init__(self, node_id: str, index: BlockMap, clock: Clock, reality: Reality) -> None:
        self._node_id = node_id
        self._index = index
        self._clock = clock
        self._reality = reality
        self._seen_s = 0.0  # when the latest change is seen
        self._left = False
        index.join(node_id)

    def store(self, packed: bytes, tier: Tier) -> None:
        """The node holds the blocks of these keys, the fastest copies in ``tier``."""
        self._later(self._index.store, packed, tier)

    def remove(self, key: bytes) -> None:
        self._later(self._index.remove, key)

    def leave(self) -> None:
        """The node has ended: its entries and changes are gone at once."""
        self._left = True
        self._index.leave(self._node_id)
        self._index.sweep(1 << 30)

    def held(self) -> set[bytes]:
        return self._index.held_by(self._node_id)

    def _later(self, change: Callable[..., None], *arguments: Any) -> None:
        lag_s = self._reality.index_lag_s()
        if not lag_s:
            change(self._node_id, *arguments)
            return
        self._seen_s = max(self._seen_s, self._clock.now_s + lag_s)
        self._clock.at(self._seen_s, self._apply, change, arguments)

    def _apply(self, change: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self._left:
            change(self._node_id, *arguments)
