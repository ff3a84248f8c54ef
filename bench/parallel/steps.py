"""Decode steps and long prompts of one plan: where their time goes."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import report
from bench.engine.session import Session
from bench.report import Row
from engine import Engine
from engine.parallel.plan import ParallelPlan
from engine.parallel.runner import StepTimes
from runtime.options import EngineOptions, ModelOptions, ParallelOptions

BATCH, CONTEXT, NUM_STEPS = 8, 256, 200
PROMPT = 4096
# What a step may cost beside its tensors at tp 2, and how much faster two stages must be than one.
BOOKKEEPING_MS = 1.5
PIPELINE_SPEEDUP = 1.5
_MAX_BATCH_TOKENS = 2048
_PIECE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class OneRank:
    """What a single process takes, seconds."""

    step_s: float
    prompt_s: float


@asynccontextmanager
async def running(model: Path, plan: ParallelPlan) -> AsyncIterator[Session]:
    parallel = ParallelOptions(tp=plan.tp, pp=plan.pp, cp=plan.cp, piece_tokens=_PIECE_TOKENS)
    options = EngineOptions(max_batch_tokens=_MAX_BATCH_TOKENS, parallel=parallel)
    engine = Engine(model, options, ModelOptions(device="cpu"))
    try:
        await engine.start()
        yield Session(engine)
    finally:
        await engine.close()


async def measure(
    model: Path, plan: ParallelPlan, rounds: int, alone: OneRank | None
) -> tuple[list[Row], OneRank]:
    """Rows of the plan, and what it took; ``alone``: one rank's, of the same run."""
    decode, prompt = (
        f"{plan}, {what}" for what in (f"decode, batch {BATCH}, context {CONTEXT}", f"prompt of {PROMPT}")
    )
    async with running(model, plan) as session:
        times: list[StepTimes] = []
        clock = session.engine.observe_steps(times.append) if plan.world_size > 1 else None
        steps = await session.decode(BATCH, CONTEXT, NUM_STEPS)
        rows = [Row(decode, "step", 1e3 * steps.step_s, "ms")]
        if clock is not None and alone is not None:
            rows += _decode_rows(decode, plan, steps.step_s, times[-NUM_STEPS:], alone)
            p50, p95, p99 = (1e6 * np.quantile(clock.samples_s, (0.5, 0.95, 0.99))).tolist()
            rows.append(Row(decode, "an exchange", p50, "µs", p50=p50, p99=p99))
            rows.append(Row(decode, "an exchange, p95", p95, "µs"))
        await session.first_token_s(PROMPT)
        times.clear()
        prompt_s = statistics.median([await session.first_token_s(PROMPT) for _ in range(rounds)])
        first = Row(prompt, "first token", 1e3 * prompt_s, "ms")
        if alone is None:
            rows.append(first)
        else:
            rows.append(report.versus(first, "one rank", 1e3 * alone.prompt_s))
            goal = (
                {"limit": "at least", "limit_value": PIPELINE_SPEEDUP} if plan == ParallelPlan(pp=2) else {}
            )
            rows.append(Row(prompt, "speedup over one rank", alone.prompt_s / prompt_s, "×", **goal))  # type: ignore[arg-type]
            rows += _shares(prompt, times)
    return rows, OneRank(steps.step_s, prompt_s)


def _decode_rows(
    case: str, plan: ParallelPlan, step_s: float, times: Sequence[StepTimes], alone: OneRank
) -> list[Row]:
    def median(of: Callable[[StepTimes], float]) -> float:
        return statistics.median(of(step) for step in times)

    leader_s = median(lambda step: step.compute_s[0] + step.collective_s[0] + step.bubble_s[0])
    goal = {"limit": "at most", "limit_value": BOOKKEEPING_MS} if plan == ParallelPlan(tp=2) else {}
    return [
        *_shares(case, times),
        Row(case, "batch to the ranks", 1e3 * median(lambda step: step.publish_s), "ms"),
        Row(case, "until all are done", 1e3 * median(lambda step: step.settle_s), "ms"),
        Row(case, "all beside tensors and exchanges", 1e3 * (step_s - leader_s), "ms", **goal),  # type: ignore[arg-type]
        Row(case, "exchanges", median(lambda step: step.num_exchanges), "a step"),
        Row(case, "exchanged by rank 0", median(lambda step: step.exchanged_nbytes) / BATCH, "bytes/token"),
        Row(case, "scaling efficiency", alone.step_s / step_s / plan.world_size, "of one rank's"),
    ]


def _shares(case: str, times: Sequence[StepTimes]) -> list[Row]:
    """Of all the steps' time: what the busiest rank computed, rank 0 exchanged, the emptiest waited."""
    total_s = sum(step.step_s for step in times)
    ranks = range(len(times[0].compute_s))
    return [
        Row(
            case,
            "computing, busiest rank",
            _share([s.compute_s for s in times], ranks, max) / total_s,
            "of the step",
        ),
        Row(
            case,
            "exchanging, most",
            _share([s.collective_s for s in times], ranks, max) / total_s,
            "of the step",
        ),
        Row(case, "bubble, most", _share([s.bubble_s for s in times], ranks, max) / total_s, "of the step"),
    ]


def _share(seconds: list[list[float]], ranks: range, choose: Callable[[list[float]], float]) -> float:
    return choose([sum(step[rank] for step in seconds) for rank in ranks])
