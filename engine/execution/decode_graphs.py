"""CUDA graphs of decode steps: recorded once per batch size, replayed with one launch."""

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
    """Return the recorded batch sizes, ascending up to ``most``: 1, 2, 4, 8, every 8 up to 64, every 32."""
    sizes = [n for n in (1, 2, 4, *range(8, 65, 8), *range(96, most, 32)) if n < most]
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class _Graph:
    rows: PaddedRows
    replay: Callable[[], Tensor]  # returns logits [size, vocab], the same memory each time


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
        """Record all sizes. ``forward`` returns logits and must do all work on the device. While recording it
        writes nothing to the pool, since every row is padding."""
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

        # The largest first: smaller graphs reuse its memory.
        for size in reversed(padded_sizes(max_batch_size)):
            self._graphs.insert(0, device.run(record(size)).wait())
        log.info(
            "decode steps of %d batch sizes recorded in %.1f s", len(self._graphs), time.monotonic() - begun_s
        )

    def run(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Return logits [num_decodes, vocab] of a plan without chunks, valid until the next call.
        ``sampled``: see ``InputBuilder.prepare``."""
        n = len(plan.decodes)
        graph = next(graph for graph in self._graphs if graph.rows.size >= n)
        self._inputs.prepare_padded(plan, graph.rows, sampled)
        return graph.replay()[:n]
