"""Experts that move while a model runs: one layer's are read beside the steps, and used from a step on."""

from __future__ import annotations

from dataclasses import replace

from moonpool.engine.experts.parallel_mixture import ExpertParallelMixture
from moonpool.engine.model.transformer import Model
from moonpool.engine.sharding.expert_placement import Holders


class ExpertSwitches:
    """Of one rank. All ranks prepare a switch, numbered from 1, before the leader names it in a step.

    used: the latest that steps compute with.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._prepared: dict[int, tuple[int, ExpertParallelMixture]] = {}
        self.used = 0

    def prepare(self, number: int, layer: int, holders: Holders) -> None:
        """Read this rank's experts of a layer, beside those in use. From any thread, one call at a time.

        A number that was prepared and not used is prepared anew. Raises CheckpointError.
        """
        shard = self._model.shard
        self._prepared.pop(number, None)  # maybe of another layer
        if layer not in shard.layers:
            return
        layers = list(shard.expert_placement.layers)
        layers[layer] = holders
        moved = replace(shard, expert_placement=replace(shard.expert_placement, layers=tuple(layers)))
        self._prepared[number] = layer - shard.layers.start, self._model.read_mixture(layer, moved)

    def use(self, number: int) -> None:
        """Compute with all switches up to ``number`` from now on, and drop the experts before. Between two
        steps."""
        while self.used < number:
            self.used += 1
            if self.used in self._prepared:
                layer, mixture = self._prepared.pop(self.used)
                self._model.layers[layer].mlp = mixture
