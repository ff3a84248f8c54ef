"""The bubble of a pipeline, and its decode throughput, against the number of its micro-batches.

Each stage's process has a memory limit that the whole model does not fit, where control groups can be made.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moonpool.bench.engine.model_shapes import make_checkpoint
from moonpool.bench.harness.child import Child
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.memory_group import NoMemoryGroups, memory_group
from moonpool.bench.harness.peers import PeerFailed
from moonpool.bench.harness.shapes import model_at
from moonpool.bench.harness.turns import spread
from moonpool.bench.parallel.stages import stages
from moonpool.bench.parallel.steps import Settings
from moonpool.runtime.reports.report import Curve, Row, versus

ROWS, CONTEXT = (8, 16, 32), 64
"""Sequences of a micro-batch, and tokens of each prompt: the prompts of a micro-batch fit one step."""
NUM_STAGES = 2
_MICRO_BATCHES = (1, 2, 3, 4)
_MOST_SEQUENCES = 64  # that a node decodes at a time by default
_X = "micro-batches of the pipeline"
# Beside its weights a process takes 0.3 to 0.4 of all weights, for blocks and buffers of its largest steps.
# These fit a stage with half of the weights, and no process with all of them.
_LIMIT_OF_WEIGHTS = 1.15


async def bubble_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """One process without a limit and with one thread first: what a stage would do with all layers."""
    with TemporaryDirectory() as folder:
        model = Path(folder)
        make_checkpoint("pipeline", model, 1024)
        assert run.conditions is not None
        others = run.conditions.models if len(run.parts) > 1 else ()
        run.conditions = replace(run.conditions, models=(*others, model_at(model, "pipeline")))
        bench = _Bubble(run, settings, model)
        async for row in bench.alone_rows():
            yield row
        limited = settings.device == "cpu"
        if limited:
            try:
                yield await bench.refused_row()
            except NoMemoryGroups as error:
                run.say(f"no process has a limit of its memory: {error}")
                limited = False
        for count in bench.counts:
            async for row in bench.pipeline_rows(count, limited=limited):
                yield row
    run.curves += bench.curves()


class _Bubble:
    """alone: tokens/s of one process in each round, by sequences. rates, bubbles: of the pipeline, by
    sequences of a micro-batch and micro-batches."""

    def __init__(self, run: Run, settings: Settings, model: Path) -> None:
        self._run, self._device, self._model = run, settings.device, model
        self._num_steps = 6 if run.quick else max(20, settings.num_steps // 4)
        self._nbytes = (model / "model.safetensors").stat().st_size
        self._limit_nbytes = round(_LIMIT_OF_WEIGHTS * self._nbytes)
        self._every_rows = ROWS[: 1 if run.quick else None]
        self.counts = _MICRO_BATCHES[: 2 if run.quick else None]
        self.alone: dict[int, list[float]] = {}
        self.rates: dict[tuple[int, int], list[float]] = {}
        self.bubbles: dict[tuple[int, int], list[float]] = {}

    def _rows(self, count: int) -> list[int]:
        return [rows for rows in self._every_rows if rows * count <= _MOST_SEQUENCES]

    async def alone_rows(self) -> AsyncIterator[Row]:
        """One process, and two that exchange nothing. Both read as many weights a second as two stages with
        as many tokens a second, of a memory that the cores share."""
        async with AsyncExitStack() as stack:
            children = [
                await stack.enter_async_context(stages(f"process {number}", self._model, self._device))
                for number in (1, 2)
            ]
            one, two = (child for child, _ in children)
            for sequences in sorted({rows * count for count in self.counts for rows in self._rows(count)}):
                self._run.say(f"one process, {sequences} sequences")
                rates = [(await self._decode(one, sequences))["rate"] for _ in range(self._run.rounds)]
                self.alone[sequences] = rates
                yield _throughput(_case("one process", sequences), rates)
            for rows in self._every_rows:
                self._run.say(f"two processes, {rows} sequences each")
                both = [
                    await asyncio.gather(self._decode(one, rows), self._decode(two, rows))
                    for _ in range(self._run.rounds)
                ]
                rates = [sum(each["rate"] for each in of_round) for of_round in both]
                case = f"two processes, decode, {rows} sequences each, context {CONTEXT}"
                alone = statistics.median(self.alone[rows])
                yield versus(_throughput(case, rates), f"one process, {rows} sequences", alone)
                yield self._read(case, rates, rows)

    async def refused_row(self) -> Row:
        """The whole model in one process with a stage's limit. Raises NoMemoryGroups."""
        with memory_group(self._limit_nbytes) as group:
            self._run.say(f"one process with {self._limit_nbytes >> 20} MiB")
            try:
                async with stages("one process", self._model, "cpu", limits=[group]):
                    raise AssertionError(f"the model fits {self._limit_nbytes} bytes")
            except PeerFailed:
                if not group.num_killed():
                    raise
            case = f"one process, limit of {self._limit_nbytes / 1e6:.0f} MB"
            return Row(case, "killed by the kernel while loading", group.num_killed(), "processes")

    async def pipeline_rows(self, count: int, *, limited: bool) -> AsyncIterator[Row]:
        """The pipeline with ``count`` micro-batches. ``limited``: each stage's process in its memory."""
        name = f"pp {NUM_STAGES}, {count} micro-batches"
        self._run.say(name)
        with ExitStack() as groups:
            limits = [
                groups.enter_context(memory_group(self._limit_nbytes))
                for _ in range(NUM_STAGES if limited else 0)
            ]
            opened = stages(
                name, self._model, self._device, pp=NUM_STAGES, micro_batches=count, limits=limits
            )
            async with opened as (pipeline, layers):
                for rows in self._rows(count):
                    for row in await self._decode_rows(pipeline, name, rows, count):
                        yield row
                yield Row(name, "layers of the first stage", layers[0], f"of {sum(layers)}")
                for stage, group in enumerate(limits):
                    used = Row(name, f"memory of stage {stage}", group.used_nbytes() / 1e6, "MB")
                    yield versus(used, "limit of a process", self._limit_nbytes / 1e6)

    async def _decode_rows(self, pipeline: Child, name: str, rows: int, count: int) -> list[Row]:
        sequences = rows * count
        found = [await self._decode(pipeline, sequences) for _ in range(self._run.rounds)]
        rates = self.rates[rows, count] = [each["rate"] for each in found]
        bubbles = self.bubbles[rows, count] = [each["bubble"] for each in found]
        case = _case(name, sequences)
        same = Row(case, "decode throughput, a stage's", statistics.median(rates), "tokens/s")
        computed_s = zip(*(each["compute_s"] for each in found), strict=True)
        return [
            versus(_throughput(case, rates), "one process", statistics.median(self.alone[sequences])),
            versus(same, f"one process, {rows} sequences", statistics.median(self.alone[rows])),
            spread(case, "bubble", bubbles, "of the stages' time"),
            *(
                spread(case, f"computing of stage {stage}, a micro-batch", seconds, "ms", 1e3)
                for stage, seconds in enumerate(computed_s)
            ),
            self._read(case, rates, rows),
        ]

    async def _decode(self, child: Child, sequences: int) -> dict[str, Any]:
        """See ``Stages.decode``."""
        found: dict[str, Any] = await child.call(
            "decode", batch=sequences, context=CONTEXT, num_steps=self._num_steps
        )
        return found

    def _read(self, case: str, rates: Sequence[float], rows: int) -> Row:
        """Every ``rows`` tokens all weights are read once."""
        nbytes_per_s = self._nbytes * statistics.median(rates) / rows
        return Row(case, "weights read by all cores", nbytes_per_s / 1e9, "GB/s")

    def curves(self) -> list[Curve]:
        found: list[Curve] = []
        alone = {(rows, count): self.alone[rows * count] for rows, count in self.rates}
        for rows in self._every_rows:
            panel, name = f"decode, {rows} sequences a micro-batch", f"pp {NUM_STAGES}, {rows} sequences"
            found += [
                Curve("bubble", name, _X, "of the stages' time", _points(self.bubbles, rows)),
                Curve(panel, f"pp {NUM_STAGES}", _X, "tokens/s", _points(self.rates, rows)),
                Curve(panel, "one process, as many sequences", _X, "tokens/s", _points(alone, rows)),
            ]
        return found


def _points(samples: Mapping[tuple[int, int], Sequence[float]], rows: int) -> list[tuple[float, float]]:
    """Medians by micro-batches, of so many sequences each."""
    return [(float(count), statistics.median(of)) for (each, count), of in samples.items() if each == rows]


def _case(name: str, sequences: int) -> str:
    return f"{name}, decode, {sequences} sequences, context {CONTEXT}"


def _throughput(case: str, rates: Sequence[float]) -> Row:
    return spread(case, "decode throughput", rates, "tokens/s")
