"""Decode steps and long prompts of one plan: where their time goes."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.bench.engine.driver import Session
from moonpool.bench.parallel.exchanges import exchange_rows, share_rows
from moonpool.engine import Engine
from moonpool.engine.ranks.group import RankGroup
from moonpool.engine.ranks.leader import StepTimes
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.runtime.config.options import EngineOptions, ModelOptions, ParallelOptions
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Row

BATCH, CONTEXT, NUM_STEPS = 8, 256, 200
PROMPT = 4096
# What a step may cost beside its tensors at tp 2, and how much faster two stages must be than one.
BOOKKEEPING_MS = 1.5
PIPELINE_SPEEDUP = 1.5
_MAX_BATCH_TOKENS = 2048
_PIECE_TOKENS = 256
_GPU_POOL_NBYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class OneRank:
    """What a single process takes, seconds."""

    step_s: float
    prompt_s: float


@asynccontextmanager
async def running(
    model: Path,
    plan: ParallelPlan,
    device: str = "cpu",
    *,
    hosts: int = 1,
    listen: str = "",
    ranks: RankGroup | None = None,
) -> AsyncIterator[Session]:
    """ranks: those of several ``hosts``, started already."""
    parallel = ParallelOptions(
        tp=plan.tp, pp=plan.pp, cp=plan.cp, micro_batch_tokens=_PIECE_TOKENS, hosts=hosts, listen=listen
    )
    options = EngineOptions(
        max_batch_tokens=_MAX_BATCH_TOKENS, pool_nbytes=pool_nbytes(device, plan), parallel=parallel
    )
    engine = Engine(model, options, ModelOptions(device=device), ranks=ranks)
    try:
        await engine.start()
        yield Session(engine)
    finally:
        await engine.close()


def pool_nbytes(device: str, plan: ParallelPlan) -> int:
    """Of a GPU's ranks, who must be told; elsewhere the default."""
    return 0 if device == "cpu" else _GPU_POOL_NBYTES * plan.world_size


async def measure(
    model: Path, plan: ParallelPlan, rounds: int, alone: OneRank | None, device: str
) -> tuple[list[Row], OneRank]:
    """Rows of the plan, and what it took; ``alone``: one rank's, of the same run."""
    async with running(model, plan, device) as session:
        return await measure_session(session, str(plan), plan, rounds, alone)


async def measure_session(
    session: Session, name: str, plan: ParallelPlan, rounds: int, alone: OneRank | None
) -> tuple[list[Row], OneRank]:
    """``measure`` of an engine that runs already, called ``name``."""
    decode, prompt = (
        f"{name}, {what}" for what in (f"decode, batch {BATCH}, context {CONTEXT}", f"prompt of {PROMPT}")
    )
    times: list[StepTimes] = []
    clock = session.engine.observe_steps(times.append) if plan.world_size > 1 else None
    steps = await session.decode(BATCH, CONTEXT, NUM_STEPS)
    rows = [Row(decode, "step", 1e3 * steps.step_s, "ms")]
    if clock is not None and alone is not None:
        decoding = times[-NUM_STEPS:]
        rows += _decode_rows(decode, plan, steps.step_s, decoding, alone)
        samples_s = list(clock.samples_s)[-sum(step.num_exchanges for step in decoding) :]
        rows += exchange_rows(decode, samples_s, decoding, NUM_STEPS, "step", BATCH)
        clock.samples_s.clear()
    await session.first_token_s(PROMPT)
    times.clear()
    prompt_s = statistics.median([await session.first_token_s(PROMPT) for _ in range(rounds)])
    first = Row(prompt, "first token", 1e3 * prompt_s, "ms")
    if clock is None or alone is None:
        rows.append(first)
    else:
        rows.append(report.versus(first, "one rank", 1e3 * alone.prompt_s))
        rows += _prompt_rows(prompt, plan, alone.prompt_s / prompt_s)
        rows += share_rows(prompt, times)
        rows += exchange_rows(prompt, clock.samples_s, times, rounds, "prompt", PROMPT)
    return rows, OneRank(steps.step_s, prompt_s)


def _prompt_rows(case: str, plan: ParallelPlan, speedup: float) -> list[Row]:
    row = Row(case, "speedup over one rank", speedup, "×")
    if plan == ParallelPlan(pp=2):
        row = replace(row, limit="at least", limit_value=PIPELINE_SPEEDUP)
    return [row, Row(case, "scaling efficiency", speedup / plan.world_size, "of one rank's")]


def _decode_rows(
    case: str, plan: ParallelPlan, step_s: float, times: Sequence[StepTimes], alone: OneRank
) -> list[Row]:
    def median(of: Callable[[StepTimes], float]) -> float:
        return statistics.median(of(step) for step in times)

    leader_s = median(lambda step: step.compute_s[0] + step.collective_s[0] + step.bubble_s[0])
    beside = Row(case, "all beside tensors and exchanges", 1e3 * (step_s - leader_s), "ms")
    if plan == ParallelPlan(tp=2):
        beside = replace(beside, limit="at most", limit_value=BOOKKEEPING_MS)
    return [
        *share_rows(case, times),
        Row(case, "batch to the ranks", 1e3 * median(lambda step: step.publish_s), "ms"),
        Row(case, "until all are done", 1e3 * median(lambda step: step.settle_s), "ms"),
        beside,
        Row(case, "scaling efficiency", alone.step_s / step_s / plan.world_size, "of one rank's"),
    ]
