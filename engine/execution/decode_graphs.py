"""Decode steps recorded once for each of some batch sizes, and replayed: a launch instead of hundreds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.engine.batching.step_plan import StepPlan
from moonpool.engine.device.device import Device
from moonpool.engine.execution.input_builder import InputBuilder, PaddedRows
from moonpool.engine.model.inputs import StepInputs

log = logging.getLogger(__name__)


def padded_sizes(most: int) -> list[int]:
    """Batch sizes that are recorded, ascending, the largest being ``most``: 1, 2, 4, 8, then every 8 up to
    64, then every 32."""
    sizes = [n for n in (1, 2, 4, *range(8, 65, 8), *range(96, most, 32)) if n < most]
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class _Graph:
    rows: PaddedRows
    replay: Callable[[], Tensor]  # gives the logits: [size, vocab], the same memory each time


class DecodeGraphs:
    """Runs the decode-only steps of one model over one pool."""

    def __init__(
        self,
        device: Device,
        inputs: InputBuilder,
        forward: Callable[[StepInputs], Tensor],
        *,
        max_batch_size: int,
    ) -> None:
        """Record all sizes. ``forward`` gives logits and must do everything on the device; it writes nothing
        to the pool meanwhile, since every row is a padded one."""
        begun_s = time.monotonic()
        self._inputs = inputs
        self._graphs: list[_Graph] = []

        def record(size: int) -> Callable[[], _Graph]:
            @torch.inference_mode()
            def step() -> _Graph:
                rows = PaddedRows.on(device.torch, size)
                tensors = rows.inputs(inputs.table)
                return _Graph(rows, device.capture(lambda: forward(tensors)))

            return step

        # The largest first: the memory its tensors need is used again for the others'.
        for size in reversed(padded_sizes(max_batch_size)):
            self._graphs.insert(0, device.run(record(size)).wait())
        self.seconds = time.monotonic() - begun_s
        log.info("decode steps of %d batch sizes recorded in %.1f s", len(self._graphs), self.seconds)

    def run(self, plan: StepPlan) -> Tensor:
        """Logits [num_decodes, vocab] of a plan without chunks; they stay until the next call."""
        n = len(plan.decodes)
        graph = next(graph for graph in self._graphs if graph.rows.size >= n)
        self._inputs.prepare_padded(plan, graph.rows)
        return graph.replay()[:n]
