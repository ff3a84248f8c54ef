"""Experts dealt out to ranks: what taking tokens to them costs, and what copies of the hot ones change."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from moonpool.bench.engine.driver import Session
from moonpool.bench.parallel import steps
from moonpool.bench.parallel.exchanges import quantile_row
from moonpool.bench.parallel.moe_checkpoint import write_mixture
from moonpool.engine import Engine
from moonpool.engine.ranks.leader import StepTimes
from moonpool.engine.sharding.expert_placement import plan_experts
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.runtime.config.options import EngineOptions, ModelOptions, ParallelOptions
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Row

PLANS = (2, 4)  # ep
PROMPTS = (64, 512, 2048)  # each one step
# Copies of hot experts, a layer.
COPIES = 4
_MAX_BATCH_TOKENS = 2048
# What the plan is made from.
_LOAD_PROMPTS = 4
_NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class Form:
    """One way of running the mixture on ``ep`` ranks."""

    words: str
    ep: int
    all_to_all_tokens: int
    plan_path: str = ""


@asynccontextmanager
async def running(model: Path, form: Form | None, device: str) -> AsyncIterator[Session]:
    parallel = ParallelOptions()
    if form is not None:
        parallel = ParallelOptions(
            tp=form.ep,
            ep=form.ep,
            all_to_all_tokens=form.all_to_all_tokens,
            expert_plan_path=form.plan_path,
        )
    nbytes = steps.pool_nbytes(device, ParallelPlan(parallel.tp))
    options = EngineOptions(max_batch_tokens=_MAX_BATCH_TOKENS, pool_nbytes=nbytes, parallel=parallel)
    engine = Engine(model, options, ModelOptions(device=device))
    try:
        await engine.start()
        yield Session(engine)
    finally:
        await engine.close()


async def measure(directory: Path, rounds: int, device: str, most_ranks: int) -> list[Row]:
    """Rows of each number of ranks: every rank sees all tokens; all-to-all; all-to-all by a plan made from
    what the second measured. One after the other in each round. ``directory``: an empty one."""
    write_mixture(directory)
    async with running(directory, None, device) as session:
        alone = (await _first_tokens([session], rounds))[0]
    rows = [Row(f"one process, prompt of {n}", "first token", 1e3 * s, "ms") for n, s in alone.items()]
    for ep in (n for n in PLANS if n <= most_ranks):
        async with AsyncExitStack() as stack:
            forms = [Form("all ranks see all tokens", ep, _NEVER), Form("all-to-all", ep, 1)]
            sessions = [await stack.enter_async_context(running(directory, form, device)) for form in forms]
            for _ in range(_LOAD_PROMPTS):
                await sessions[1].first_token_s(max(PROMPTS))
            await sessions[1].engine.refresh_expert_load()
            plan = plan_experts(sessions[1].engine.expert_load(), ep, COPIES)
            path = directory / f"plan-{ep}.json"
            path.write_text(plan.to_json())
            forms.append(Form(f"all-to-all, {COPIES} copies a layer", ep, 1, str(path)))
            sessions.append(await stack.enter_async_context(running(directory, forms[2], device)))
            took = await _first_tokens(sessions, rounds)
            found = [
                await _rows(*of_form, alone, rounds) for of_form in zip(forms, sessions, took, strict=True)
            ]
            # The plan's skew, beside the plain deal's.
            found[2][-1] = report.versus(found[2][-1], "plain deal", found[1][-1].value)
            rows += [row for of_form in found for row in of_form]
    return rows


async def _rows(
    form: Form, session: Session, took_s: dict[int, float], alone: dict[int, float], rounds: int
) -> list[Row]:
    """The last one says how uneven its ranks were."""
    name, longest = f"ep {form.ep}, {form.words}", max(PROMPTS)
    rows = []
    for n, seconds in took_s.items():
        row = Row(f"{name}, prompt of {n}", "first token", 1e3 * seconds, "ms")
        rows.append(report.versus(row, "one process", 1e3 * alone[n]))
    times: list[StepTimes] = []
    clock = session.engine.observe_steps(times.append)
    clock.all_to_all_samples_s.clear()
    before = clock.num_all_to_alls, clock.all_to_all_nbytes
    for _ in range(rounds):
        await session.first_token_s(longest)
    count, nbytes = clock.num_all_to_alls - before[0], clock.all_to_all_nbytes - before[1]
    case = f"{name}, prompt of {longest}"
    if count:
        rows += _all_to_all_rows(case, clock.all_to_all_samples_s, count / rounds, nbytes / rounds / longest)
        rows.append(Row(case, "in all-to-all, most", _most(times), "of the step"))
    await session.engine.refresh_expert_load()
    skew = session.engine.expert_placement.skew(session.engine.expert_load())
    return [*rows, Row(case, "busiest rank over mean", skew, "×")]


def _all_to_all_rows(case: str, samples_s: Sequence[float], count: float, nbytes: float) -> list[Row]:
    return [
        Row(case, "all-to-alls", count, "a step"),
        Row(case, "given by rank 0 in them", nbytes, "bytes/token"),
        quantile_row(case, "an all-to-all", samples_s),
        Row(case, "all-to-alls, seconds", count * statistics.mean(samples_s), "s/step"),
    ]


def _most(times: Sequence[StepTimes]) -> float:
    """Of all the steps' time, what the rank that was longest in all-to-all was there."""
    ranks = range(len(times[0].all_to_all_s))
    longest_s = max(sum(step.all_to_all_s[rank] for step in times) for rank in ranks)
    return longest_s / sum(step.step_s for step in times)


async def _first_tokens(sessions: Sequence[Session], rounds: int) -> list[dict[int, float]]:
    """Seconds to the first token by length, medians; all in turn in each round, after one that warms."""
    seconds: list[dict[int, list[float]]] = [{n: [] for n in PROMPTS} for _ in sessions]
    for _ in range(rounds + 1):
        for n in PROMPTS:
            for session, took in zip(sessions, seconds, strict=True):
                took[n].append(await session.first_token_s(n))
    return [{n: statistics.median(of_n[1:]) for n, of_n in took.items()} for took in seconds]
