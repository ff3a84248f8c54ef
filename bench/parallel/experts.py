"""MoE experts distributed over ranks: the cost of moving tokens to them, with and without copies."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from moonpool.bench.engine.driver import Session
from moonpool.bench.engine.model_shapes import write_mixture
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import spread, turns
from moonpool.bench.parallel.steps import Settings, running
from moonpool.engine.ranks.leader import StepTimes
from moonpool.engine.sharding.expert_placement import plan_experts
from moonpool.runtime.config.options import ParallelOptions
from moonpool.runtime.reports.report import Row, versus

NUM_RANKS = (2, 4)
PROMPTS = (64, 512, 2048)  # each one step
COPIES = 4  # of hot experts, a layer
# Prompts that the load is measured with, which the placement follows.
_LOAD_PROMPTS = 4
_NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class ExpertDispatch:
    """One way to run the mixture on ``ep`` ranks."""

    label: str
    ep: int
    all_to_all_tokens: int
    plan_path: str = ""

    @property
    def options(self) -> ParallelOptions:
        return ParallelOptions(
            tp=self.ep,
            ep=self.ep,
            all_to_all_tokens=self.all_to_all_tokens,
            expert_plan_path=self.plan_path,
        )


async def expert_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Every rank sees all tokens; all-to-all; all-to-all with copies of hot experts; by number of ranks.

    The copies follow from the load that the second way measured.
    """
    device = settings.device
    with TemporaryDirectory() as made:
        model = Path(made)
        write_mixture(model)
        async with running(model, device, ParallelOptions()) as session:
            alone = (await _first_tokens([session], run.rounds))[0]
        for n, seconds in alone.items():
            yield Row(f"one process, prompt of {n}", "first token", 1e3 * seconds, "ms")
        for ep in (n for n in NUM_RANKS[: 1 if run.quick else None] if n <= settings.max_ranks):
            ways = [
                ExpertDispatch("all ranks see all tokens", ep, _NEVER),
                ExpertDispatch("all-to-all", ep, 1),
            ]
            async with AsyncExitStack() as stack:
                sessions = [
                    await stack.enter_async_context(running(model, device, way.options)) for way in ways
                ]
                measured = sessions[1]
                for _ in range(_LOAD_PROMPTS):
                    await measured.first_token_s(max(PROMPTS))
                await measured.engine.refresh_expert_load()
                path = model / f"plan-{ep}.json"
                path.write_text(plan_experts(measured.engine.expert_load(), ep, COPIES).to_json())
                ways.append(ExpertDispatch(f"all-to-all, {COPIES} copies a layer", ep, 1, str(path)))
                sessions.append(await stack.enter_async_context(running(model, device, ways[2].options)))
                first_tokens = await _first_tokens(sessions, run.rounds)
                found = [
                    await _way_rows(*of_way, alone, run.rounds)
                    for of_way in zip(ways, sessions, first_tokens, strict=True)
                ]
            # The skew with copies, beside the one without.
            found[2][-1] = versus(found[2][-1], "plain deal", found[1][-1].value)
            for rows in found:
                for row in rows:
                    yield row


async def _way_rows(
    way: ExpertDispatch, session: Session, first_s: dict[int, float], alone: dict[int, float], rounds: int
) -> list[Row]:
    """The last row is the load of the busiest rank over the mean."""
    name, longest = f"ep {way.ep}, {way.label}", max(PROMPTS)
    rows = []
    for n, seconds in first_s.items():
        row = Row(f"{name}, prompt of {n}", "first token", 1e3 * seconds, "ms")
        rows.append(versus(row, "one process", 1e3 * alone[n]))
    times: list[StepTimes] = []
    clock = session.engine.observe_steps(times.append)
    clock.all_to_all_samples_s.clear()
    before = clock.num_all_to_alls, clock.all_to_all_nbytes
    for _ in range(rounds):
        await session.first_token_s(longest)
    count, nbytes = (clock.num_all_to_alls - before[0]) / rounds, clock.all_to_all_nbytes - before[1]
    case = f"{name}, prompt of {longest}"
    if count:
        samples_s = list(clock.all_to_all_samples_s)
        rows += [
            Row(case, "all-to-alls", count, "a step"),
            Row(case, "given by rank 0 in them", nbytes / rounds / longest, "bytes/token"),
            spread(case, "an all-to-all", samples_s, "µs", 1e6),
            Row(case, "all-to-alls, seconds", count * statistics.mean(samples_s), "s/step"),
            Row(case, "in all-to-all, most", _largest_fraction(times), "of the step"),
        ]
    await session.engine.refresh_expert_load()
    skew = session.engine.expert_placement.skew(session.engine.expert_load())
    return [*rows, Row(case, "busiest rank over mean", skew, "×")]


def _largest_fraction(times: Sequence[StepTimes]) -> float:
    """The time in all-to-all of the rank that spent most there, as a fraction of all the steps' time."""
    ranks = range(len(times[0].all_to_all_s))
    longest_s = max(sum(step.all_to_all_s[rank] for step in times) for rank in ranks)
    return longest_s / sum(step.step_s for step in times)


async def _first_tokens(sessions: Sequence[Session], rounds: int) -> list[dict[int, float]]:
    """Median seconds to the first token, by the prompt's length, of each session."""
    contestants = {
        (i, n): partial(session.first_token_s, n) for n in PROMPTS for i, session in enumerate(sessions)
    }
    seconds = await turns(contestants, rounds)
    return [{n: statistics.median(seconds[i, n]) for n in PROMPTS} for i in range(len(sessions))]
