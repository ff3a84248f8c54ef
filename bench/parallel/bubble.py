"""The bubble of a pipeline, and its decode throughput, against the number of its micro-batches."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from moonpool.bench.engine.driver import Session
from moonpool.bench.engine.model_shapes import make_checkpoint
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.models import model_at
from moonpool.bench.harness.turns import spread
from moonpool.bench.parallel.steps import Settings, running
from moonpool.engine.ranks.leader import StepTimes
from moonpool.runtime.config.options import ParallelOptions
from moonpool.runtime.reports.report import Curve, Row, versus

ROWS, CONTEXT = 8, 64
"""Sequences of a micro-batch, and tokens of each prompt: all prompts together fit one step."""
NUM_STAGES = 2
_MICRO_BATCHES = (1, 2, 3, 4)
_X = "micro-batches of the pipeline"
# The last steps, in which sequences end.
_TAIL_STEPS = 4


async def bubble_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """One process with one thread first: what a stage would do with all layers."""
    counts, num_steps = _MICRO_BATCHES[: 2 if run.quick else None], max(20, settings.num_steps // 4)
    with TemporaryDirectory() as folder:
        model = Path(folder)
        name = "small" if run.quick else "pipeline"
        make_checkpoint(name, model, 1024)
        assert run.conditions is not None
        others = run.conditions.models if len(run.parts) > 1 else ()
        run.conditions = replace(run.conditions, models=(*others, model_at(model, name)))
        alone: dict[int, list[float]] = {}
        async with running(model, settings.device, ParallelOptions(), threads=1) as session:
            for count in counts:
                run.say(f"one process, {count * ROWS} sequences")
                alone[count], _ = await _decode(session, count, run.rounds, num_steps)
                yield _throughput(_case("one process", count), alone[count])
        found: dict[int, tuple[list[float], list[float]]] = {}
        for count in counts:
            run.say(f"{NUM_STAGES} stages, {count} micro-batches")
            options = ParallelOptions(pp=NUM_STAGES, micro_batches=count)
            async with running(model, settings.device, options, threads=1) as session:
                times: list[StepTimes] = []
                session.engine.observe_steps(times.append)
                found[count] = await _decode(session, count, run.rounds, num_steps, times)
                layers = session.engine.plan.stage_layers(session.engine.config)
            case, (rates, bubbles) = _case(f"pp {NUM_STAGES}, {count} micro-batches", count), found[count]
            yield versus(_throughput(case, rates), "one process", statistics.median(alone[count]))
            one_stage = f"one process, {ROWS} sequences"
            same = Row(case, "decode throughput, a stage's", statistics.median(rates), "tokens/s")
            yield versus(same, one_stage, statistics.median(alone[1]))
            yield spread(case, "bubble", bubbles, "of the stages' time")
            yield Row(case, "layers of the first stage", layers[0], f"of {sum(layers)}")
    run.curves += _curves(alone, found)


def _case(name: str, count: int) -> str:
    return f"{name}, decode, {count * ROWS} sequences, context {CONTEXT}"


def _throughput(case: str, rates: Sequence[float]) -> Row:
    return spread(case, "decode throughput", rates, "tokens/s")


async def _decode(
    session: Session, count: int, rounds: int, num_steps: int, times: list[StepTimes] | None = None
) -> tuple[list[float], list[float]]:
    """Return tokens/s, and the bubble if ``times`` gets the steps' times, of each round."""
    rates, bubbles = [], []
    for _ in range(rounds):
        if times is not None:
            times.clear()
        steps = await session.decode(count * ROWS, CONTEXT, num_steps)
        rates.append(count * ROWS / steps.step_s)
        if times is not None:
            tail = _TAIL_STEPS * count
            bubbles.append(bubble(times[-num_steps * count - tail : -tail]))
    return rates, bubbles


def bubble(times: Sequence[StepTimes]) -> float:
    """Return the fraction of the ranks' time in which they did not compute, from the first step's end on."""
    wall_s = sum(step.step_s for step in times)
    computed_s = sum(map(sum, (step.compute_s for step in times)))
    return 1.0 - computed_s / wall_s / len(times[0].compute_s)


def _curves(alone: dict[int, list[float]], found: dict[int, tuple[list[float], list[float]]]) -> list[Curve]:
    def medians(of: dict[int, list[float]]) -> list[tuple[float, float]]:
        return [(count, statistics.median(samples)) for count, samples in of.items()]

    rates = {count: of[0] for count, of in found.items()}
    panel, bubbles = f"decode, {ROWS} sequences a micro-batch", {c: of[1] for c, of in found.items()}
    return [
        Curve("bubble", f"pp {NUM_STAGES}", _X, "of the stages' time", medians(bubbles)),
        Curve(panel, f"pp {NUM_STAGES}", _X, "tokens/s", medians(rates)),
        Curve(panel, "one process, as many sequences", _X, "tokens/s", medians(alone)),
    ]
