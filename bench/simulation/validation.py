"""The same workload on a real local cluster and in the simulator, compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moonpool.bench.harness.services import local_cluster
from moonpool.bench.harness.turns import quantile
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import Server
from moonpool.bench.simulation.cluster_replay import Replayed, measured_hardware, replay
from moonpool.runtime.config.engine_options import CPU_LIMITS
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.workload import Workload
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

_ROUNDS = 3
# Queueing amplifies a change of the factors, so they are fitted step by step.
_FITTING_STEPS = 5
# Limit of the relative error of the mean TTFT and TPOT.
TOLERANCE = 0.15
REAL = "real cluster"


@dataclass(frozen=True, slots=True)
class Settings:
    """``sets``: options of the local cluster; ``longest``: tokens of the longest prompt."""

    workload: Workload
    sets: Sequence[str] = ()
    longest: int = 1800


def default_workload(seed: int) -> Workload:
    """Return about ten seconds of work that keeps nodes of the shipped model on two cores a quarter busy."""
    return Workload(
        sessions=12,
        rate=1.0,
        system_tokens=256,
        prompt_tokens=512,
        turn_tokens=96,
        output_tokens=64,
        spread=0.5,
        turns=2.0,
        think_s=1.5,
        token_s=0.002,
        block_tokens=16,
        seed=seed,
    )


async def validate(settings: Settings, say: Callable[[str], None]) -> list[Row]:
    """Run workloads of different seeds on a cluster; fit to half of them, and simulate the other half.

    Fitted are a factor for prefills and one for decode steps.

    Raises:
        MoonpoolError: the cluster did not start, or failed a request. It has been stopped.
    """
    config = load_config(None, settings.sets)
    options = config.engine.within(CPU_LIMITS)
    seed = settings.workload.seed
    runs: list[Replayed] = []
    say("starting a local cluster")
    async with local_cluster(settings.sets) as url, HttpClient(url) as http:
        server = await Server.find("the cluster", http)
        prefill, decode = await measured_hardware(
            server,
            block_tokens=config.engine.block_size,
            chunk_tokens=options.max_batch_tokens,
            max_batch_size=options.max_batch_size,
            seed=seed,
        )
        # Runs to fit and to measure alternate, because the machine's other load changes.
        for number in range(2 * _ROUNDS + 1):
            say(f"run {number + 1} of {2 * _ROUNDS + 1}, to {'measure' if number % 2 else 'fit'}")
            workload = replace(settings.workload, seed=seed + number * 1_000_000)
            runs.append(await _run(server, settings, workload))
    scenario = Scenario(
        hardware=prefill,
        decode_hardware=decode,
        num_prefill=config.cluster.prefill,
        num_decode=config.cluster.decode,
        policy=config.conductor.policy,
        block_tokens=config.engine.block_size,
    )
    scenario = _fitted(scenario, runs[::2], say)
    measured = runs[1::2]
    return _rows(measured, [Simulation(scenario, run.requests).run() for run in measured])


def _fitted(scenario: Scenario, runs: Sequence[Replayed], say: Callable[[str], None]) -> Scenario:
    """Return the scenario with fitted factors: nodes measured themselves on an idle machine."""
    prefill = decode = 1.0
    start = scenario
    ttft_s = statistics.fmean(answer.ttft_s for run in runs for answer in run.answers)
    tpot_s = statistics.fmean(a.tpot_s for run in runs for a in run.answers if a.output_tokens > 1)
    for _ in range(_FITTING_STEPS):
        outcomes = [Simulation(scenario, run.requests).run() for run in runs]
        prefill *= ttft_s / statistics.fmean(outcome.mean_ttft_s for outcome in outcomes)
        decode *= tpot_s / statistics.fmean(outcome.mean_tpot_s for outcome in outcomes)
        assert start.decode_hardware is not None
        scenario = replace(
            start,
            hardware=start.hardware.scaled(prefill=prefill),
            decode_hardware=start.decode_hardware.scaled(decode=decode),
        )
    say(f"prefills took {prefill:.2f}, decode steps {decode:.2f} times the nodes' own measurement")
    return scenario


async def _run(server: Server, settings: Settings, workload: Workload) -> Replayed:
    requests = [r for r in workload.requests() if r.input_tokens <= settings.longest]
    return await replay(server, requests, block_tokens=workload.block_tokens, seed=workload.seed)


def _rows(real: Sequence[Replayed], simulated: Sequence[Outcome]) -> list[Row]:
    """Return the simulator's figures beside the real ones; the limits apply to their ratio."""
    answers = [answer for run in real for answer in run.answers]
    served = [each for outcome in simulated for each in outcome.served]
    case = f"{len(answers)} requests in {len(real)} runs"
    cached = sum(answer.cached_tokens for answer in answers)
    hits = sum(outcome.hit_tokens[tier] for outcome in simulated for tier in ("pool", "host", "ssd", "peer"))
    prompts = sum(each.input_tokens for each in served)
    times = {
        "TTFT": ([a.ttft_s for a in answers], [s.ttft_s for s in served]),
        "TPOT": (
            [a.tpot_s for a in answers if a.output_tokens > 1],
            [s.tpot_s for s in served if s.output_tokens > 1],
        ),
        "E2E": ([a.e2e_s for a in answers], [s.e2e_s for s in served]),
    }
    rows: list[Row] = []
    for metric, (actual, ours) in times.items():
        limited = metric != "E2E"
        rows.append(_mean(case, metric, actual, ours, "at most" if limited else None))
        if limited:
            rows.append(_mean(case, f"{metric}, from below", actual, ours, "at least"))
        for percent in (50, 90, 99):
            row = Row(case, f"{metric} p{percent}", 1e3 * quantile(ours, percent / 100), "ms")
            rows.append(versus(row, REAL, 1e3 * quantile(actual, percent / 100)))
    hit = Row(case, "cache hit", 100 * hits / prompts, "% of prompt tokens")
    rows.append(versus(hit, REAL, 100 * cached / prompts) if cached else hit)
    return rows


def _mean(case: str, metric: str, actual: Sequence[float], ours: Sequence[float], limit: str | None) -> Row:
    row = Row(
        case,
        metric if "," in metric else f"{metric}, mean",
        1e3 * statistics.fmean(ours),
        "ms",
        limit=limit,
        limit_value=None if limit is None else 1 + TOLERANCE * (1 if limit == "at most" else -1),
    )
    return versus(row, REAL, 1e3 * statistics.fmean(actual))
