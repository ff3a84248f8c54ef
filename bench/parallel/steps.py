"""Decode steps and long prompts of one plan: where their time goes."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.bench.engine.driver import Session
from moonpool.bench.harness.child import started
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import spread
from moonpool.engine.engine import Engine
from moonpool.engine.ranks.group import RankGroup
from moonpool.engine.ranks.leader import StepTimes
from moonpool.engine.ranks.rank_listener import RankListener
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.runtime.config.options import EngineOptions, ModelOptions, ParallelOptions, SecurityOptions
from moonpool.runtime.reports.report import Row, versus
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import NODE, Caller

BATCH, CONTEXT = 8, 256
MAX_BATCH_TOKENS = 2048
_MICRO_BATCH_TOKENS = 256
_GPU_POOL_NBYTES = 4 << 30
_HOSTS_PLAN, _NUM_HOSTS = ParallelPlan(pp=2), 2


@dataclass(frozen=True, slots=True)
class Settings:
    """num_steps, prompt_tokens, num_blocks: of each measurement."""

    model: Path
    plans: Sequence[ParallelPlan]
    device: str
    max_ranks: int
    num_steps: int
    prompt_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class OneRank:
    """Seconds of a single process."""

    step_s: float
    prompt_s: float


async def step_rows(run: Run, settings: Settings) -> list[Row]:
    """One rank first: the plans are compared with it."""
    one, alone, every = ParallelPlan(), None, list[Row]()
    for plan in [one, *(plan for plan in settings.plans if plan != one)]:
        run.say(str(plan))
        parallel = ParallelOptions(tp=plan.tp, pp=plan.pp, cp=plan.cp, micro_batch_tokens=_MICRO_BATCH_TOKENS)
        async with running(settings.model, settings.device, parallel) as session:
            rows, took = await _measure(session, str(plan), plan, run.rounds, settings, alone)
        alone = alone or took
        every += rows
    return every


async def host_rows(run: Run, settings: Settings) -> list[Row]:
    """Two stages on one machine and over two, which loopback plays: links and calls.

    The time of the wire between machines is not in them.
    """
    model, plan = settings.model, _HOSTS_PLAN
    parallel = ParallelOptions(pp=plan.pp, micro_batch_tokens=_MICRO_BATCH_TOKENS)
    async with running(model, "cpu", ParallelOptions()) as session:
        _, alone = await _measure(session, "", ParallelPlan(), run.rounds, settings, None)
    async with running(model, "cpu", parallel) as session:
        one, _ = await _measure(session, f"{plan}, one machine", plan, run.rounds, settings, alone)
    async with _over_hosts(model, parallel) as session:
        name = f"{plan}, {_NUM_HOSTS} machines on loopback"
        several, _ = await _measure(session, name, plan, run.rounds, settings, alone)
    plain = [replace(row, peer=None, peer_value=None, ratio=None) for row in several]
    return one + [
        versus(bare, "one machine", other.value) if other.value else row
        for bare, row, other in zip(plain, several, one, strict=True)
    ]


@asynccontextmanager
async def running(
    model: Path,
    device: str,
    parallel: ParallelOptions,
    ranks: RankGroup | None = None,
    threads: int = 0,
    pool_nbytes: int = 0,
) -> AsyncIterator[Session]:
    """An engine. ranks: those of several hosts, started already. threads: of each rank; 0: on CPUs one, so
    that plans are compared by their ranks. pool_nbytes: of all ranks; 0: enough for every prompt."""
    world_size = parallel.tp * parallel.pp * parallel.cp
    options = EngineOptions(
        max_batch_tokens=MAX_BATCH_TOKENS,
        # On GPUs it must be set.
        pool_nbytes=pool_nbytes or (0 if device == "cpu" else _GPU_POOL_NBYTES * world_size),
        threads=threads or int(device == "cpu"),
        parallel=parallel,
    )
    engine = Engine(model, options, ModelOptions(device=device), ranks=ranks)
    try:
        await engine.start()
        yield Session(engine)
    finally:
        await engine.close()


@asynccontextmanager
async def _over_hosts(model: Path, parallel: ParallelOptions) -> AsyncIterator[Session]:
    """An engine with its second stage started as by a launcher on another machine."""
    parallel = replace(parallel, hosts=_NUM_HOSTS, listen="127.0.0.1:0")
    # The rank below has no key.
    process.use(process.Security(SecurityOptions(), Caller(NODE, "bench")))
    listener = RankListener(parallel, "bench")
    group = RankGroup(_HOSTS_PLAN.world_size, parallel.timeout_s, listener)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(group.close)
        starting = asyncio.create_task(group.start(threads=1))
        # It listens after its first step, and then waits for the rank of the other machine.
        await asyncio.sleep(0)
        command = [sys.executable, "-m", "moonpool.engine.ranks.worker"]
        command += ["--leader", f"127.0.0.1:{listener.port}", "--set", "node.id=remote"]
        launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        await stack.enter_async_context(started("rank", command, environment=launched, prints_ready=False))
        await starting
        yield await stack.enter_async_context(running(model, "cpu", parallel, group))


async def _measure(
    session: Session, name: str, plan: ParallelPlan, rounds: int, settings: Settings, alone: OneRank | None
) -> tuple[list[Row], OneRank]:
    """Rows of the plan, and its seconds. ``alone``: one rank's, of the same run."""
    num_steps, prompt_tokens = settings.num_steps, settings.prompt_tokens
    decode = f"{name}, decode, batch {BATCH}, context {CONTEXT}"
    prompt = f"{name}, prompt of {prompt_tokens}"
    times: list[StepTimes] = []
    clock = session.engine.observe_steps(times.append) if plan.world_size > 1 else None
    steps = await session.decode(BATCH, CONTEXT, num_steps)
    rows = [Row(decode, "step", 1e3 * steps.step_s, "ms")]
    if clock is not None and alone is not None:
        num_parts = session.engine.setup.steps_in_flight
        decoding = times[-num_steps * num_parts :]
        rows += _decode_rows(decode, plan, steps.step_s, num_parts, decoding, alone)
        samples_s = list(clock.samples_s)[-sum(step.num_exchanges for step in decoding) :]
        rows += _exchange_rows(decode, samples_s, decoding, num_steps, "step", BATCH)
        clock.samples_s.clear()
    await session.first_token_s(prompt_tokens)
    times.clear()
    prompt_s = statistics.median([await session.first_token_s(prompt_tokens) for _ in range(rounds)])
    first = Row(prompt, "first token", 1e3 * prompt_s, "ms")
    if clock is None or alone is None:
        rows.append(first)
    else:
        speedup = alone.prompt_s / prompt_s
        rows += [
            versus(first, "one rank", 1e3 * alone.prompt_s),
            Row(prompt, "speedup over one rank", speedup, "×"),
            Row(prompt, "scaling efficiency", speedup / plan.world_size, "of one rank's"),
            *_time_fraction_rows(prompt, times),
            *_exchange_rows(prompt, list(clock.samples_s), times, rounds, "prompt", prompt_tokens),
        ]
    return rows, OneRank(steps.step_s, prompt_s)


def _decode_rows(
    case: str,
    plan: ParallelPlan,
    step_s: float,
    num_parts: int,
    times: Sequence[StepTimes],
    alone: OneRank,
) -> list[Row]:
    """step_s: of a token of each sequence, which are ``num_parts`` of the steps in ``times``."""

    def median_ms(of: Callable[[StepTimes], float]) -> float:
        return 1e3 * statistics.median(of(step) for step in times)

    leader_ms = num_parts * median_ms(
        lambda step: step.compute_s[0] + step.collective_s[0] + step.bubble_s[0]
    )
    return [
        *_time_fraction_rows(case, times),
        Row(case, "batch to the ranks", median_ms(lambda step: step.publish_s), "ms"),
        Row(case, "until all are done", median_ms(lambda step: step.settle_s), "ms"),
        Row(case, "all beside tensors and exchanges", 1e3 * step_s - leader_ms, "ms"),
        Row(case, "scaling efficiency", alone.step_s / step_s / plan.world_size, "of one rank's"),
    ]


def _exchange_rows(
    case: str, samples_s: Sequence[float], times: Sequence[StepTimes], num: int, of: str, num_tokens: int
) -> list[Row]:
    """Rank 0's exchanges. times: of ``num`` steps or prompts (``of``) of ``num_tokens`` tokens each.

    samples_s: of all exchanges, or the last of them.
    """
    count = sum(step.num_exchanges for step in times) / num
    nbytes = sum(step.exchanged_nbytes for step in times) / num
    rows = [
        Row(case, "exchanges", count, f"a {of}"),
        Row(case, "exchanged by rank 0", nbytes, f"bytes/{of}"),
        Row(case, "exchanged by rank 0, by token", nbytes / num_tokens, "bytes/token"),
    ]
    if samples_s:
        seconds = Row(case, "exchanges, seconds", count * statistics.mean(samples_s), f"s/{of}")
        rows += [spread(case, "an exchange", samples_s, "µs", 1e6), seconds]
    return rows


def _time_fraction_rows(case: str, times: Sequence[StepTimes]) -> list[Row]:
    """The fraction of all the steps' time: for each kind, of the rank that spent most time in it."""
    total_s = sum(step.step_s for step in times)
    kinds = {
        "computing, busiest rank": [step.compute_s for step in times],
        "exchanging, most": [step.collective_s for step in times],
        "bubble, most": [step.bubble_s for step in times],
    }
    return [
        Row(case, name, max(map(sum, zip(*of_steps, strict=True))) / total_s, "of the step")
        for name, of_steps in kinds.items()
    ]
